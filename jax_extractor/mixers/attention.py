"""Multi-head self-attention, the baseline."""

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_extractor import ops
from jax_extractor.mixers.cache import append, check_decodable, fill
from jax_extractor.mixers.common import (
    check_divisible,
    check_even,
    check_input,
    check_one_step,
    compute_dtype,
    projection,
    rotary,
)
from jax_extractor.shapes import Array


class MultiHeadAttention(nn.Module):
    """Multi-head self-attention with bias-free projections, 4D² parameters.

        o_h = softmax(q_h k_hᵀ / √K + mask) v_h,   out = [o_1 … o_H] W_o

    with q = x W_q, k = x W_k, v = x W_v cut into H heads of width K = D/H. Called as
    `(x, valid, deterministic)` with x (B, T, D) and valid (B, T) bool, True = real position;
    returns (B, T, D). A position with nothing to attend to gives 0. Positions are the caller's
    concern (add embeddings to x) unless rotary is set. With decode=True x continues the sequence in
    the collection "cache", see `mixers`. Source: Vaswani et al. 2017.

    Attributes:
        num_heads: H, must divide D.
        max_length: how many positions are remembered while decoding; otherwise any length is read.
        causal: whether position i sees j ≤ i only.
        rotary: whether queries and keys are rotated by position (RoFormer, Su et al. 2021).
        dtype: of the computation and the result. None: what x and param_dtype promote to.
        param_dtype: of the parameters.

    Raises:
        UsageError: a shape, dtype or size that does not fit.
    """

    num_heads: int
    max_length: int | None = None
    causal: bool = True
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
    ) -> Array:
        """Returns (B, T, D) for x (B, T, D); no dropout inside, so `deterministic` is not read."""
        check_input(x, valid)
        batch, time, features = x.shape
        check_divisible(features, self.num_heads)
        width = features // self.num_heads
        dtype = compute_dtype(x, self.dtype, self.param_dtype)

        def heads(name: str) -> Array:
            y = projection(features, name, dtype, self.param_dtype)(x)
            return y.reshape(batch, time, self.num_heads, width)

        query, key, value = heads("query"), heads("key"), heads("value")
        cached = decode and self.has_variable("cache", "keys")
        if self.rotary:
            check_even(width, features, self.num_heads)
            start = self.get_variable("cache", "keys").seen if cached else 0
            positions = start + jnp.arange(time)
            query, key = rotary(query, positions), rotary(key, positions)
        if decode:
            out = self._decode(query, key, value, valid, cached)
        else:
            mask = None if valid is None else valid[:, None, None, :]
            out = ops.talking_heads_attention(query, key, value, mask=mask, causal=self.causal)
        out = out.reshape(batch, time, features)
        return projection(features, "output", dtype, self.param_dtype)(out)

    def _decode(
        self, query: Array, key: Array, value: Array, valid: Array | None, cached: bool
    ) -> Array:
        """Attention of positions that continue the sequence in the "cache" collection."""
        check_decodable(self.causal, self.max_length)
        real = jnp.ones(key.shape[:2], bool) if valid is None else valid
        if not cached:
            self.put_variable("cache", "keys", fill((key, value), real, self.max_length or 0))
            mask = real[:, None, None, :]
            return ops.talking_heads_attention(query, key, value, mask=mask, causal=True)
        check_one_step(key)
        cache = append(self.get_variable("cache", "keys"), (key, value), real)
        self.put_variable("cache", "keys", cache)
        keys, values = cache.entries
        return ops.talking_heads_attention(query, keys, values, mask=cache.mask())
