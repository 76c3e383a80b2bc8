"""The seam between a model and what writes text with it: a prompt at once, then token by token.

Sampling and beam search know `Decoder` alone. `make_decoder` is the one place that chooses an
implementation: those of `cached`, which remember. The plainest one, which recomputes the context for
every token, stays here as their reference.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp

from jax_extractor.generation.cached import CachedDecoder, RereadingDecoder
from jax_extractor.models import LanguageModel
from jax_extractor.shapes import Array, Bool, Float, Int, PyTree


@runtime_checkable
class Decoder(Protocol):
    """A language model read token by token. Pure methods on arrays; the object itself is hashable.

    Rows of a batch are left-padded to equal length: valid (B, P) is True for real tokens, of which
    every row has at least one. Logits (B, V) are float32 and predict the token that comes next.
    """

    def prompt_width(self, longest: int) -> int:
        """P for prompts of at most `longest` tokens; few different ones, each is a compilation.

        Longer prompts are cut to their last P tokens.
        """

    def prepare(self, params: PyTree) -> PyTree:
        """The weights that the other methods take; called once for a model."""

    def prefill(self, weights: PyTree, tokens: Array, valid: Array) -> tuple[Array, Any]:
        """(logits after the last token, state) for prompts (B, P)."""

    def step(self, weights: PyTree, state: Any, tokens: Array) -> tuple[Array, Any]:
        """(logits, state) after one more token for each row, tokens (B,)."""

    def select(self, state: Any, rows: Array) -> Any:
        """The state of rows[0], rows[1], …, with repetitions as they come."""


class Window(NamedTuple):
    """The last L tokens of each row, newest last."""

    tokens: Int[Array, "B L"]
    valid: Bool[Array, "B L"]


@dataclass(frozen=True)
class WindowDecoder:
    """Recomputes the last L tokens for every new one, whatever the model: L times the work.

    What it writes past L tokens, it writes with the last L as its whole context.
    """

    model: LanguageModel

    def prompt_width(self, longest: int) -> int:
        """L, for every prompt."""
        return self.model.config.max_length

    def prepare(self, params: PyTree) -> PyTree:
        """The parameters as they are."""
        return params

    def prefill(
        self, weights: PyTree, tokens: Int[Array, "B L"], valid: Bool[Array, "B L"]
    ) -> tuple[Float[Array, "B V"], Window]:
        """(logits after the last token, the window)."""
        logits = cast(Array, self.model.apply({"params": weights}, tokens, valid))
        return logits[:, -1], Window(tokens, valid)

    def step(
        self, weights: PyTree, state: Window, tokens: Int[Array, "B"]
    ) -> tuple[Float[Array, "B V"], Window]:
        """(logits, the window moved on by one)."""
        moved = jnp.concatenate([state.tokens[:, 1:], tokens[:, None]], axis=1)
        valid = jnp.concatenate([state.valid[:, 1:], jnp.ones_like(state.valid[:, :1])], axis=1)
        return self.prefill(weights, moved, valid)

    def select(self, state: Window, rows: Int[Array, "N"]) -> Window:
        """The windows of these rows."""
        return jax.tree.map(lambda leaf: leaf[rows], state)


def make_decoder(model: LanguageModel) -> Decoder:
    """The decoder for a model: with a memory, whatever its mixer."""
    embedded = model.config.resolved_positions() in ("learned", "sinusoidal")
    return RereadingDecoder(model) if embedded else CachedDecoder(model)
