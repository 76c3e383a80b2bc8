"""Token ids of prompts, and text out of tokens: whole characters, up to a stop string."""

from collections.abc import Sequence

import numpy as np

from jax_extractor.data import Tokenizer


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> np.ndarray:
    """Token ids (P,) of a prompt; an empty one becomes a line break, as a model needs a token."""
    return tokenizer.encode(prompt or "\n")


def pad_prompts(prompts: Sequence[np.ndarray], width: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens (B, P) int32, valid (B, P)): the last P tokens of each, padded on the left with 0."""
    tokens = np.zeros((len(prompts), width), np.int32)
    valid = np.zeros((len(prompts), width), bool)
    for row, prompt in enumerate(prompts):
        last = prompt[-width:]
        tokens[row, width - len(last) :] = last
        valid[row, width - len(last) :] = True
    return tokens, valid


class TextStream:
    """Text as tokens come. Holds back unfinished characters and what may begin a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self._decoder = tokenizer.incremental_decoder()
        self._stop = stop
        self._held = ""
        self.stopped = False

    def feed(self, token: int) -> str:
        """The text that is certain after `token`; sets `stopped` where a stop string is whole."""
        self._held += self._decoder.feed(token)
        return self._release(self._undecided())

    def finish(self) -> str:
        """What is still held back, when no token follows."""
        self._held += self._decoder.flush()
        return self._release(0)

    def _release(self, undecided: int) -> str:
        """Everything before the first stop string or, without one, before the undecided end."""
        starts = [start for s in self._stop if (start := self._held.find(s)) >= 0]
        if starts:
            self.stopped = True
            text, self._held = self._held[: min(starts)], ""
            return text
        end = len(self._held) - undecided
        text, self._held = self._held[:end], self._held[end:]
        return text

    def _undecided(self) -> int:
        """Length of the longest end of what is held that a stop string begins with."""
        return max(
            (
                length
                for s in self._stop
                for length in range(1, min(len(s), len(self._held) + 1))
                if self._held.endswith(s[:length])
            ),
            default=0,
        )
