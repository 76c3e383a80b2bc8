"""Sampling text: one loop on the device, text given out while it is made."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jax_extractor.data import Tokenizer
from jax_extractor.errors import UsageError
from jax_extractor.generation.decoding import Decoder, make_decoder
from jax_extractor.generation.sampling import SamplingConfig, sample, sample_keys
from jax_extractor.generation.text import TextStream, encode_prompt, pad_prompts
from jax_extractor.models import LanguageModel
from jax_extractor.shapes import Array, Bool, Float, Int, Key, PyTree

#: Tokens of one call to the device: the host is busy once for so many, and text comes in such bits.
CHUNK = 16


@dataclass(frozen=True)
class GenerationConfig:
    """How much text is written, how it is drawn, and where it ends."""

    max_tokens: int = 256
    """Length of a text in tokens."""
    samples: int = 1
    """Texts for each prompt."""
    seed: int = 0
    """The same seed gives the same texts."""
    stop: tuple[str, ...] = ()
    """A text ends before the first of these strings."""
    end_token: int | None = None
    """A text ends before this token, too."""
    batch_size: int = 16
    """Texts that are made at a time."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How tokens are drawn."""

    def check(self) -> None:
        """Raises UsageError naming the first field that does not fit."""
        for name in ("max_tokens", "samples", "batch_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: choose at least 1")
        if not 0 <= self.seed < 2**31:
            raise UsageError(f"seed={self.seed}: choose from 0 to {2**31 - 1}")
        if isinstance(self.stop, str) or not all(self.stop):
            raise UsageError(f"stop={self.stop!r}: give a tuple of strings, none of them empty")
        if self.end_token is not None and self.end_token < 0:
            raise UsageError(f"end_token={self.end_token}: choose a token id, 0 or more")
        self.sampling.check()


@runtime_checkable
class Writer(Protocol):
    """What text is written with; a `training.Run` is one."""

    @property
    def model(self) -> LanguageModel:
        """The language model."""

    @property
    def params(self) -> PyTree:
        """Its parameters."""

    @property
    def tokenizer(self) -> Tokenizer:
        """How its tokens become text."""


@dataclass(frozen=True)
class Completion:
    """A finished text. prompt + text is what was written.

    tokens and log_probabilities (nats, under the unmodified model) go up to the token that was the
    end token or completed a stop string, or up to max_tokens; text ends before either.
    """

    prompt: str
    sample: int
    text: str
    tokens: tuple[int, ...]
    log_probabilities: tuple[float, ...]
    stopped: bool


class Piece(NamedTuple):
    """More of text number `row` = prompt · samples + sample; its last piece completes it."""

    row: int
    text: str
    completion: Completion | None


class Carry(NamedTuple):
    """What goes from token to token."""

    state: PyTree
    logits: Float[Array, "B V"]
    seen: Bool[Array, "B V"]
    position: Int[Array, ""]


@partial(jax.jit, static_argnames="decoder")
def start(
    decoder: Decoder, weights: PyTree, tokens: Int[Array, "B P"], valid: Bool[Array, "B P"]
) -> Carry:
    """Reads the prompts."""
    logits, state = decoder.prefill(weights, tokens, valid)
    rows = jnp.arange(len(tokens))[:, None]
    seen = jnp.zeros(logits.shape, bool).at[rows, tokens].max(valid)
    return Carry(state, logits, seen, jnp.zeros((), jnp.int32))


@partial(jax.jit, static_argnames=("decoder", "sampling", "length"), donate_argnames="carry")
def advance(
    decoder: Decoder,
    sampling: SamplingConfig,
    length: int,
    weights: PyTree,
    keys: Key[Array, "B"],
    carry: Carry,
) -> tuple[Carry, Int[Array, "N B"], Float[Array, "N B"]]:
    """Draws N = length tokens for each row: (carry, tokens, log-probabilities)."""

    def body(carry: Carry, _) -> tuple[Carry, tuple[Array, Array]]:
        token, log_probability = sample(carry.logits, keys, carry.position, sampling, carry.seen)
        seen = carry.seen.at[jnp.arange(len(token)), token].set(True)
        logits, state = decoder.step(weights, carry.state, token)
        return Carry(state, logits, seen, carry.position + 1), (token, log_probability)

    carry, (tokens, log_probabilities) = jax.lax.scan(body, carry, None, length)
    return carry, tokens, log_probabilities


def stream(
    run: Writer,
    prompts: Sequence[str],
    config: GenerationConfig = GenerationConfig(),
    *,
    decoder: Decoder | None = None,
) -> Iterator[Piece]:
    """Writes on after every prompt, `samples` times each; yields text while it is made.

    A text depends on (seed, prompt, number of the sample), not on the batch it is made in (to the
    rounding of the logits). Prompts longer than the decoder's width are cut to their last tokens;
    an empty one is shown to the model as a line break. Rows are made batch_size at a time, each
    until its stop string, end token or max_tokens; wrong fields and prompts show before any text.

    Raises:
        UsageError: a field that does not fit, no prompt, or a string in place of a list of them.
        InputError: a prompt that the tokenizer has no token for.
    """
    config.check()
    _check_prompts(prompts)
    vocabulary = run.tokenizer.vocab_size
    if config.end_token is not None and config.end_token >= vocabulary:
        raise UsageError(
            f"end_token={config.end_token}: choose from 0 to {vocabulary - 1} (vocabulary)"
        )
    encoded = [encode_prompt(run.tokenizer, prompt) for prompt in prompts]
    return _stream(run, prompts, encoded, config, decoder or make_decoder(run.model))


def _check_prompts(prompts: Sequence[str]) -> None:
    if isinstance(prompts, str):
        raise UsageError(f"prompts={prompts!r} is one string: give a list of them, [{prompts!r}]")
    if not prompts:
        raise UsageError("prompts is empty: give at least one, which may be an empty string")


def _stream(
    run: Writer,
    prompts: Sequence[str],
    encoded: list[np.ndarray],
    config: GenerationConfig,
    decoder: Decoder,
) -> Iterator[Piece]:
    weights = decoder.prepare(run.params)
    width = decoder.prompt_width(max(map(len, encoded)))
    total = len(prompts) * config.samples
    size = min(config.batch_size, total)
    for first in range(0, total, size):
        rows = [
            Row(index, *divmod(index, config.samples), prompts, run.tokenizer, config)
            for index in range(first, min(first + size, total))
        ]
        # A last batch that is short repeats its last row: one shape, one compilation.
        filled = rows + rows[-1:] * (size - len(rows))
        padded = pad_prompts([encoded[row.prompt_index] for row in filled], width)
        keys = sample_keys(config.seed, jnp.asarray([row.sample for row in filled], jnp.int32))
        carry = start(decoder, weights, *padded)
        for made in range(0, config.max_tokens, CHUNK):
            carry, *drawn = advance(decoder, config.sampling, CHUNK, weights, keys, carry)
            chunk = [np.asarray(array)[: config.max_tokens - made].T for array in drawn]
            last = made + CHUNK >= config.max_tokens
            for row, tokens, log_probabilities in zip(rows, *chunk, strict=False):
                if not row.done:
                    yield row.add(tokens, log_probabilities, last)
            if all(row.done for row in rows):
                break


class Row:
    """One text in the making."""

    def __init__(
        self,
        index: int,
        prompt_index: int,
        sample: int,
        prompts: Sequence[str],
        tokenizer: Tokenizer,
        config: GenerationConfig,
    ):
        self.index, self.prompt_index, self.sample = index, prompt_index, sample
        self.prompt = prompts[prompt_index]
        self.stream = TextStream(tokenizer, config.stop)
        self.end_token = config.end_token
        self.text = ""
        self.tokens: list[int] = []
        self.log_probabilities: list[float] = []
        self.ended = self.done = False

    def add(self, tokens: np.ndarray, log_probabilities: np.ndarray, last: bool) -> Piece:
        """Takes the tokens of a chunk, up to the one that ends the text."""
        text = ""
        for token, log_probability in zip(tokens.tolist(), log_probabilities.tolist(), strict=True):
            self.tokens.append(token)
            self.log_probabilities.append(log_probability)
            self.ended = token == self.end_token
            if self.ended:
                break
            text += self.stream.feed(token)
            if self.stream.stopped:
                break
        self.done = last or self.ended or self.stream.stopped
        if self.done and not self.stream.stopped:
            text += self.stream.finish()
        self.text += text
        return Piece(self.index, text, self._completion() if self.done else None)

    def _completion(self) -> Completion:
        return Completion(
            prompt=self.prompt,
            sample=self.sample,
            text=self.text,
            tokens=tuple(self.tokens),
            log_probabilities=tuple(self.log_probabilities),
            stopped=self.ended or self.stream.stopped,
        )


def generate(
    run: Writer,
    prompts: Sequence[str],
    config: GenerationConfig = GenerationConfig(),
    *,
    decoder: Decoder | None = None,
) -> list[Completion]:
    """The completions that `stream` ends with, in the order of prompts and samples.

    Raises what `stream` raises.
    """
    pieces = stream(run, prompts, config, decoder=decoder)
    done = {piece.row: piece.completion for piece in pieces if piece.completion is not None}
    return [done[index] for index in sorted(done)]
