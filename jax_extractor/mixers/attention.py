"""Multi-head self-attention, the baseline."""

import flax.linen as nn
import jax.numpy as jnp

from jax_extractor import ops
from jax_extractor.errors import UsageError
from jax_extractor.mixers.common import (
    check_divisible,
    check_input,
    projection,
    real_positions,
    rotary,
)
from jax_extractor.shapes import Array


class MultiHeadAttention(nn.Module):
    """Multi-head self-attention with bias-free projections, 4D² parameters.

        o_h = softmax(q_h k_hᵀ / √K + mask) v_h,   out = [o_1 … o_H] W_o

    with q = x W_q, k = x W_k, v = x W_v cut into H heads of width K = D/H. Called as
    `(x, valid, deterministic)` with x (B, T, D) and valid (B, T) bool, True = real position;
    returns (B, T, D). A position with nothing to attend to gives 0. Positions are the caller's
    concern (add embeddings to x) unless rotary is set. Source: Vaswani et al. 2017.

    Attributes:
        num_heads: H, must divide D.
        max_length: the context of the model it serves; attention itself reads any length.
        causal: whether position i sees j ≤ i only.
        rotary: whether queries and keys are rotated by position (RoFormer, Su et al. 2021).

    Raises:
        UsageError: a shape, dtype or size that does not fit.
    """

    num_heads: int
    max_length: int | None = None
    causal: bool = True
    rotary: bool = False
    dtype: jnp.dtype | None = None
    param_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array, valid: Array | None = None, deterministic: bool = True) -> Array:
        """Returns (B, T, D) for x (B, T, D); no dropout inside, so `deterministic` is not read."""
        check_input(x, valid)
        batch, time, features = x.shape
        check_divisible(features, self.num_heads)
        width = features // self.num_heads

        def heads(name: str) -> Array:
            y = projection(features, name, self.dtype, self.param_dtype)(x)
            return y.reshape(batch, time, self.num_heads, width)

        query, key, value = heads("query"), heads("key"), heads("value")
        if self.rotary:
            if width % 2:
                raise UsageError(
                    f"rotary positions turn pairs, but a head is {width} wide "
                    f"(features={features}, num_heads={self.num_heads}): choose an even width"
                )
            positions = jnp.arange(time) if valid is None else real_positions(valid)
            query, key = rotary(query, positions), rotary(key, positions)
        mask = None if valid is None else valid[:, None, None, :]
        out = ops.talking_heads_attention(query, key, value, mask=mask, causal=self.causal)
        out = out.reshape(batch, time, features)
        return projection(features, "output", self.dtype, self.param_dtype)(out)
