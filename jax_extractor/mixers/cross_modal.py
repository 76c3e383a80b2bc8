"""Talking-heads attention of two sequences to each other, as a Flax module."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_extractor.errors import UsageError
from jax_extractor.mixers.common import check_input
from jax_extractor.mixers.talking_heads import TalkingHeadsAttention
from jax_extractor.shapes import Array


class CrossModalTalkingHeads(nn.Module):
    """Two sequences attend to each other at once, each direction with its own head mixing.

    In the direction x ← y the queries are x's, keys and values are y's; x has Hx = num_heads heads,
    y has Hy = other_heads, and the logits J of the Hx heads are mixed by P (Hx, Hy) to the head set
    of y, whose values are read. The direction y ← x has its own P (Hy, Hx) and projections. Called as
    `(x, valid, deterministic, other=y, other_valid=…)` with x (B, T, D) and y (B, S, D'); returns the
    pair of (B, T, D) and (B, S, D'). Called without `other`, as a mixer of one sequence, both
    directions read that sequence causally and their mean (B, T, D) is returned.

    That each direction has a mixing of its own between the two head sets is what is published of
    this variant; its place before the softmax, and the mixing of the weights, are our
    reconstruction.

    Attributes:
        num_heads: Hx.
        other_heads: Hy; None takes num_heads.
        max_length: as in `TalkingHeadsAttention`, for decoding one sequence.
        mixing_init, logits_dropout, weights_dropout: as in `TalkingHeadsAttention`.

    Raises:
        UsageError: a shape, dtype, size or name that does not fit.
    """

    num_heads: int = 8
    other_heads: int | None = None
    max_length: int | None = None
    mixing_init: str = "auto"
    logits_dropout: float = 0.0
    weights_dropout: float = 0.0
    rotary: bool = False
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Array,
        valid: Array | None = None,
        deterministic: bool = True,
        decode: bool = False,
        *,
        other: Array | None = None,
        other_valid: Array | None = None,
    ) -> Array | tuple[Array, Array]:
        """Returns the pair of both directions' outputs, or their mean for one sequence."""
        heads = self.num_heads
        other_heads = heads if self.other_heads is None else self.other_heads
        forward = self._direction("from_other", heads, other_heads)
        backward = self._direction("to_other", other_heads, heads)
        if other is None and other_valid is not None:
            raise UsageError("other_valid is given without other: pass both, or neither")
        if other is None:
            both = [d(x, valid, deterministic, decode) for d in (forward, backward)]
            return jax.tree.map(lambda a, b: (a + b) / 2, *both)
        if decode:
            raise UsageError("decode=True with other: both sequences are known whole; decode one")
        check_input(x, valid)
        check_input(other, other_valid, "other")
        if other.shape[0] != x.shape[0]:
            raise UsageError(f"other has batch {other.shape[0]} and x {x.shape[0]}: pair them up")
        return (
            forward(x, valid, deterministic, memory=other, memory_valid=other_valid),
            backward(other, other_valid, deterministic, memory=x, memory_valid=valid),
        )

    def _direction(self, name: str, queries: int, values: int) -> TalkingHeadsAttention:
        return TalkingHeadsAttention(
            key_heads=queries,
            heads=values,
            value_heads=values,
            max_length=self.max_length,
            mixing_init=self.mixing_init,
            logits_dropout=self.logits_dropout,
            weights_dropout=self.weights_dropout,
            rotary=self.rotary,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            name=name,
        )
