"""Decoders that remember: caches of keys for attention, streams for Extractors.

`CachedDecoder` serves models that go on without end: Extractors, whose window slides in every layer,
and attention with rotary positions or none, whose keys lie in a ring. `RereadingDecoder` serves
models with embedded positions, of which there are L: a row that has used them up goes on from its
last L/2 tokens, which are read anew.
"""

from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from jax_extractor.models import LanguageModel
from jax_extractor.shapes import Array, Bool, Float, Int, PyTree

#: The shortest width that prompts are padded to.
SHORTEST = 16


class Weights(NamedTuple):
    """The parameters, and what is made of them once for decoding (the streams' transforms)."""

    params: PyTree
    plan: PyTree


class Rows(NamedTuple):
    """The collection "cache" of the model."""

    cache: PyTree


def read(
    model: LanguageModel, weights: Weights, tokens: Array, valid: Array | None, past: PyTree = None
) -> tuple[Float[Array, "B V"], PyTree]:
    """(logits after the last token, cache) for tokens (B, T): a prompt, or one more position."""
    variables = {"params": weights.params, "plan": weights.plan}
    if past is not None:
        variables["cache"] = past
    logits, changed = model.apply(variables, tokens, valid, decode=True, mutable=["cache"])
    # Layers of a feed-forward network alone remember nothing: they make no cache.
    return cast(Array, logits)[:, -1], changed.get("cache", {})


def make_plan(model: LanguageModel, params: PyTree) -> PyTree:
    """The collection "plan": transforms of the weights, made once for a model."""
    token = jnp.zeros((1, 1), jnp.int32)
    _, made = model.apply({"params": params}, token, decode=True, mutable=["cache", "plan"])
    return made.get("plan", {})


@cache
def batch_axes(model: LanguageModel) -> PyTree:
    """For each leaf of the cache the axis of the batch, −1 where the batch shares the leaf."""

    def after_one_token(batch: int) -> PyTree:
        tokens = jnp.zeros((batch, 1), jnp.int32)
        params = model.init(jax.random.key(0), tokens)["params"]
        valid = jnp.ones((batch, 1), bool)
        return read(model, Weights(params, make_plan(model, params)), tokens, valid)[1]

    def differing(two, three) -> int:
        axes = [i for i, (a, b) in enumerate(zip(two.shape, three.shape, strict=True)) if a != b]
        return axes[0] if axes else -1

    return jax.tree.map(differing, *(jax.eval_shape(partial(after_one_token, n)) for n in (2, 3)))


def select_rows(model: LanguageModel, cached: PyTree, rows: Int[Array, "N"]) -> PyTree:
    """The cache of rows[0], rows[1], …; leaves that the batch shares stay as they are."""
    return jax.tree.map(
        lambda leaf, axis: leaf if axis < 0 else jnp.take(leaf, rows, axis=axis),
        cached,
        batch_axes(model),
    )


def padded_width(longest: int) -> int:
    """The next power of two, so that prompts of similar length share a compilation."""
    return max(SHORTEST, 1 << max(longest - 1, 0).bit_length())


def _rows(found: tuple[Array, PyTree]) -> tuple[Array, Rows]:
    return found[0], Rows(found[1])


@dataclass(frozen=True)
class CachedDecoder:
    """Reads the prompt once, then one token at a time, without end."""

    model: LanguageModel

    def prompt_width(self, longest: int) -> int:
        """The next power of two: no prompt is cut."""
        return padded_width(longest)

    def prepare(self, params: PyTree) -> Weights:
        """The parameters with the transforms of an Extractor's weights."""
        return Weights(params, jax.jit(partial(make_plan, self.model))(params))

    def prefill(
        self, weights: Weights, tokens: Int[Array, "B P"], valid: Bool[Array, "B P"]
    ) -> tuple[Float[Array, "B V"], Rows]:
        """(logits after the last token, cache)."""
        return _rows(read(self.model, weights, tokens, valid))

    def step(
        self, weights: Weights, state: Rows, tokens: Int[Array, "B"]
    ) -> tuple[Float[Array, "B V"], Rows]:
        """(logits, cache) after one more token."""
        return _rows(read(self.model, weights, tokens[:, None], None, state.cache))

    def select(self, state: Rows, rows: Int[Array, "N"]) -> Rows:
        """The caches of these rows."""
        return Rows(select_rows(self.model, state.cache, rows))


class Reread(NamedTuple):
    """A cache, and the last L tokens of each row to read it anew from, newest last."""

    cache: PyTree
    tokens: Int[Array, "B L"]
    valid: Bool[Array, "B L"]


@dataclass(frozen=True)
class RereadingDecoder:
    """A `CachedDecoder` for L embedded positions.

    When a row has used all of them, the batch is read anew: that row's last L/2 tokens, and all
    that the other rows hold. So a row's text does not depend on the rows beside it, and a reading
    of L tokens is paid at most once in L/2 tokens of each row.
    """

    model: LanguageModel

    def prompt_width(self, longest: int) -> int:
        """The next power of two, at most L."""
        return min(padded_width(longest), self.model.config.max_length)

    def prepare(self, params: PyTree) -> Weights:
        """The parameters; attention has no transforms."""
        return Weights(params, {})

    def prefill(
        self, weights: Weights, tokens: Int[Array, "B P"], valid: Bool[Array, "B P"]
    ) -> tuple[Float[Array, "B V"], Reread]:
        """(logits after the last token, state)."""
        logits, made = read(self.model, weights, tokens, valid)
        pad = [(0, 0), (self.model.config.max_length - tokens.shape[1], 0)]
        return logits, Reread(made, jnp.pad(tokens, pad), jnp.pad(valid, pad))

    def step(
        self, weights: Weights, state: Reread, tokens: Int[Array, "B"]
    ) -> tuple[Float[Array, "B V"], Reread]:
        """(logits, state) after one more token."""
        length = self.model.config.max_length
        window = jnp.concatenate([state.tokens[:, 1:], tokens[:, None]], axis=1)
        valid = jnp.concatenate([state.valid[:, 1:], jnp.ones_like(state.valid[:, :1])], axis=1)
        used_up = state.cache["seen"] >= length
        newest = jnp.arange(length) >= length - max(length // 2, 1)
        kept = jnp.where(used_up[:, None], valid & newest, valid)

        def anew() -> tuple[Array, PyTree]:
            return read(self.model, weights, window, kept)

        def on() -> tuple[Array, PyTree]:
            return read(self.model, weights, tokens[:, None], None, state.cache)

        logits, made = jax.lax.cond(jnp.any(used_up), anew, on)
        return logits, Reread(made, window, kept)

    def select(self, state: Reread, rows: Int[Array, "N"]) -> Reread:
        """The states of these rows."""
        cached = select_rows(self.model, state.cache, rows)
        return Reread(cached, state.tokens[rows], state.valid[rows])
