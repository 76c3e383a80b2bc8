"""A causal language model on the Transformer core."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jax_extractor.errors import UsageError
from jax_extractor.mixers.common import real_positions
from jax_extractor.models.config import ModelConfig
from jax_extractor.models.core import Core
from jax_extractor.shapes import Array


def sinusoids(length: int, features: int) -> np.ndarray:
    """Fixed positional embeddings (length, features), sines then cosines. Vaswani et al. 2017."""
    half = (features + 1) // 2
    angle = np.arange(length)[:, None] / 10_000.0 ** (np.arange(half) / half)
    table = np.concatenate([np.sin(angle), np.cos(angle)], axis=1)[:, :features]
    return table.astype(np.float32)


class LanguageModel(nn.Module):
    """Embedding, Transformer core, final norm, softmax regression.

        logits = norm(core(embed(tokens) [+ positions])) W_out

    Called as `(tokens, valid, deterministic)` with tokens (B, T) int and valid (B, T) bool; returns
    the logits (B, T, V) in float32: position i predicts token i+1. Rows left-padded with
    valid=False give at their real positions what the unpadded rows give. With decode=True tokens
    continue the sequences in the collections "cache" and "plan", as `mixers` tells; where positions
    are embedded there are max_length of them, and logits of a later position are NaN.

    Attributes:
        config: sizes and switches.
        vocab_size: V.

    Raises:
        UsageError: sizes that do not fit, or T > max_length where positions are embedded.
    """

    config: ModelConfig
    vocab_size: int

    @nn.compact
    def __call__(
        self,
        tokens: Array,
        valid: Array | None = None,
        deterministic: bool = True,
        return_rows: bool = False,
        decode: bool = False,
    ) -> Array | tuple[Array, Array]:
        """Returns logits (B, T, V); with return_rows also every layer's rows (M+1, B, T, D)."""
        config = self.config
        config.check()
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise UsageError(
                f"tokens have shape {tokens.shape} and dtype {tokens.dtype}: "
                "a language model takes (batch, time) integers"
            )
        dtype = jnp.dtype(config.dtype)
        embed = nn.Embed(self.vocab_size, config.features, dtype=dtype, name="embed")
        x = self._add_positions(embed(tokens), valid, decode)
        x = nn.Dropout(config.dropout)(x, deterministic=deterministic)
        x, rows = Core(config, name="core")(x, valid, deterministic, return_rows, decode)
        x = nn.LayerNorm(dtype=dtype, name="final_norm")(x)
        # The products accumulate in float32; logits rounded to bfloat16 would blur the loss.
        dot = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
        if config.tied:
            logits = dot(x, embed.embedding.astype(dtype), (((2,), (1,)), ((), ())))
        else:
            logits = nn.Dense(
                self.vocab_size, use_bias=False, dtype=dtype, dot_general=dot, name="softmax"
            )(x)
        return logits if rows is None else (logits, rows)

    def _add_positions(self, x: Array, valid: Array | None, decode: bool) -> Array:
        kind = self.config.resolved_positions()
        if kind in ("none", "rotary"):
            return x
        time, length = x.shape[1], self.config.max_length
        if time > length:
            raise UsageError(
                f"{time} tokens, but max_length={length} positions are embedded: "
                "shorten the input or train with a larger model.max_length"
            )
        shape = (length, self.config.features)
        if kind == "learned":
            table = self.param("positions", nn.initializers.normal(0.02), shape)
        else:
            table = jnp.asarray(sinusoids(*shape))
        table = table.astype(x.dtype)
        if valid is None and not decode:
            return x + table[:time]
        real = jnp.ones(x.shape[:2], bool) if valid is None else valid
        positions = real_positions(real)
        if decode:
            zeros = jnp.zeros(x.shape[:1], jnp.int32)
            seen = self.variable("cache", "seen", lambda: zeros)
            positions += seen.value[:, None]
            seen.value += jnp.sum(real, axis=1, dtype=jnp.int32)
        # A position past the table has no embedding: NaN shows what clipping would hide.
        return x + jnp.take(table, positions, axis=0, mode="fill", fill_value=jnp.nan)
