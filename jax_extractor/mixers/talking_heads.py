"""Talking-heads attention as a Flax module; `cross_modal` pairs two of them."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_extractor import ops
from jax_extractor.errors import UsageError, unknown_name
from jax_extractor.mixers.cache import append, check_decodable, fill
from jax_extractor.mixers.common import (
    check_even,
    check_input,
    check_one_step,
    compute_dtype,
    projection,
    rotary,
)
from jax_extractor.shapes import Array, Float, Int


def mixing_initializer(name: str, heads_in: int, heads_out: int) -> nn.initializers.Initializer:
    """How a mixing (heads_in, heads_out) starts.

    identity: ones on the diagonal, so that square mixings begin as plain attention; orthogonal:
    random orthonormal rows or columns; normal: variance 1/heads_in; auto: identity where square,
    else orthogonal. None of them is zero: a zero mixing gets no gradient from the other side.
    """
    if name == "auto":
        name = "identity" if heads_in == heads_out else "orthogonal"
    initializers = {
        "identity": lambda key, shape, dtype: jnp.eye(*shape, dtype=dtype),
        # The decomposition behind it knows no halves.
        "orthogonal": lambda key, shape, dtype: nn.initializers.orthogonal()(
            key, shape, jnp.float64 if dtype == jnp.float64 else jnp.float32
        ).astype(dtype),
        "normal": nn.initializers.variance_scaling(1.0, "fan_in", "normal"),
    }
    if name not in initializers:
        raise unknown_name("mixing_init", name, ["auto", *initializers])
    return initializers[name]


class Sides(NamedTuple):
    """What attention reads: from the queries' side and from the memory's, dynamic terms included."""

    query: Array
    dynamic_pre: Array | None
    dynamic_post: Array | None


class Memory(NamedTuple):
    """What attention reads from the memory's side; this is what a cache holds."""

    key: Array
    value: Array
    dynamic_pre: Array | None
    dynamic_post: Array | None


class TalkingHeadsAttention(nn.Module):
    """Attention whose heads exchange information before and after the softmax.

        J = q kᵀ/√K,  L = drop(J·P_l) + bias,  W = softmax(L),  U = drop(W·P_w),  out = (U v) W_o

    with key heads (Hk), softmax heads (H) and value heads (Hv) of three different counts: P_l is
    (Hk, H), P_w is (H, Hv), neither has a bias. Masks act after P_l. Called as
    `(x, valid, deterministic)` with x (B, T, D) and valid (B, T) bool, True = real position;
    returns (B, T, D). Given memory (B, S, D') the keys and values come from there, each of them
    visible where memory_valid (B, S) says so. A position with nothing to attend to gives 0.
    With decode=True x continues the sequence in the collection "cache", see `mixers`. Applied with
    mutable=["intermediates"], it also gives out its `ops.AttentionMaps` under the name "maps".
    Source: Shazeer et al. 2020, with the dynamic projections of its authors.

    Attributes:
        heads: H; None takes num_heads.
        key_heads: Hk; None takes heads. The queries and keys of a head are key_width wide.
        value_heads: Hv; None takes heads. The values of a head are value_width wide.
        num_heads: the default of the three counts, the field that all mixers share.
        max_length: how many positions are remembered while decoding, and how far the position
            bias reaches.
        key_width: K; None takes D // Hk.
        value_width: None takes D // Hv.
        mix_logits: whether there is a P_l; without it Hk must equal H.
        mix_weights: whether there is a P_w; without it H must equal Hv.
        mixing_init: how P_l and P_w start, see `mixing_initializer`.
        logits_dropout: rate of the dropout after P_l.
        weights_dropout: rate of the dropout after P_w.
        position_bias: whether every softmax head learns a bias for each offset 0…L−1 (larger ones
            take the last), initially 0. It is held as (H, T, S).
        dynamic_query_logits, dynamic_memory_logits: whether P_l gets a term x P computed from the
            row of the query, and of the key.
        dynamic_query_weights, dynamic_memory_weights: the same for P_w.
        dynamic_scale: standard deviation of the dynamic terms at the start, for x of variance 1.
        causal: whether position i sees j ≤ i only; not used with memory.
        rotary: whether queries and keys are rotated by position.
        block_size: queries a block, see `ops.talking_heads_attention`; None chooses.

    Raises:
        UsageError: a shape, dtype, size or name that does not fit.
    """

    heads: int | None = None
    key_heads: int | None = None
    value_heads: int | None = None
    num_heads: int = 8
    max_length: int | None = None
    key_width: int | None = None
    value_width: int | None = None
    mix_logits: bool = True
    mix_weights: bool = True
    mixing_init: str = "auto"
    logits_dropout: float = 0.0
    weights_dropout: float = 0.0
    position_bias: bool = False
    dynamic_query_logits: bool = False
    dynamic_memory_logits: bool = False
    dynamic_query_weights: bool = False
    dynamic_memory_weights: bool = False
    dynamic_scale: float = 1e-2
    causal: bool = True
    rotary: bool = False
    block_size: int | None = None
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
        memory: Array | None = None,
        memory_valid: Array | None = None,
    ) -> Array:
        """Returns (B, T, D) for x (B, T, D)."""
        check_input(x, valid)
        features = x.shape[-1]
        counts = self._counts()
        cross = memory is not None
        if memory_valid is not None and not cross:
            raise UsageError("memory_valid is given without memory: pass both, or neither")
        source, source_valid = (x, valid) if memory is None else (memory, memory_valid)
        check_input(source, source_valid, "memory")
        dtype = compute_dtype(x, self.dtype, self.param_dtype)
        x, source = x.astype(dtype), source.astype(dtype)
        cached = decode and not cross and self.has_variable("cache", "keys")
        start = self.get_variable("cache", "keys").seen if cached else 0
        sides = self._query_side(x, counts, start, features)
        seen = self._memory_side(source, counts, start, features)

        mask = None if source_valid is None else source_valid[:, None, None, :]
        causal, times = self.causal and not cross, None
        if decode and not cross:
            check_decodable(self.causal, self.max_length)
            real = jnp.ones(x.shape[:2], bool) if valid is None else valid
            if cached:
                check_one_step(x)
                cache = append(self.get_variable("cache", "keys"), seen, real)
                seen, mask, times = cache.entries, cache.mask(), cache.time
                causal = False
            else:
                cache = fill(seen, real, self.max_length or 0)
            self.put_variable("cache", "keys", cache)
        bias = self._position_bias(x.shape[1], seen.key.shape[1], start, times, cross)
        pre, post = self._mixing("pre_mixing", counts[:2]), self._mixing("post_mixing", counts[1:])
        dropout = (0.0, 0.0) if deterministic else (self.logits_dropout, self.weights_dropout)
        options: dict[str, Any] = {
            "mask": mask,
            "bias": bias,
            "causal": causal,
            "dynamic_pre": _dynamic(sides.dynamic_pre, seen.dynamic_pre),
            "dynamic_post": _dynamic(sides.dynamic_post, seen.dynamic_post),
        }
        if self.is_mutable_collection("intermediates") and not self.is_initializing():
            maps = ops.attention_maps(sides.query, seen.key, pre, post, **options)
            self.sow("intermediates", "maps", maps)
        out = ops.talking_heads_attention(
            sides.query,
            seen.key,
            seen.value,
            pre,
            post,
            **options,
            block_size=self.block_size,
            dropout=dropout,
            dropout_rng=self.make_rng("dropout") if any(dropout) else None,
        )
        out = out.reshape(*x.shape[:2], -1)
        return projection(features, "output", self.dtype, self.param_dtype)(out)

    def _counts(self) -> tuple[int, int, int]:
        """(Hk, H, Hv)."""
        heads = self.num_heads if self.heads is None else self.heads
        key_heads = heads if self.key_heads is None else self.key_heads
        value_heads = heads if self.value_heads is None else self.value_heads
        for name, count in (
            ("key_heads", key_heads),
            ("heads", heads),
            ("value_heads", value_heads),
        ):
            if count < 1:
                raise UsageError(f"{name}={count}: choose at least 1")
        if not self.mix_logits and key_heads != heads:
            raise UsageError(
                f"key_heads={key_heads} and heads={heads} with mix_logits=False: "
                "choose equal counts, or mix"
            )
        if not self.mix_weights and heads != value_heads:
            raise UsageError(
                f"heads={heads} and value_heads={value_heads} with mix_weights=False: "
                "choose equal counts, or mix"
            )
        return key_heads, heads, value_heads

    def _query_side(self, x: Array, counts: tuple[int, int, int], start, features: int) -> Sides:
        key_heads, heads, value_heads = counts
        width = _width(self.key_width, features, key_heads, "key")
        query = self._heads(x, "query", key_heads, width)
        return Sides(
            self._rotated(query, start, features),
            self._terms(x, "query_logits", self.dynamic_query_logits, (key_heads, heads)),
            self._terms(x, "query_weights", self.dynamic_query_weights, (heads, value_heads)),
        )

    def _memory_side(self, m: Array, counts: tuple[int, int, int], start, features: int) -> Memory:
        key_heads, heads, value_heads = counts
        width = _width(self.key_width, features, key_heads, "key")
        value_width = _width(self.value_width, features, value_heads, "value")
        key = self._heads(m, "key", key_heads, width)
        return Memory(
            self._rotated(key, start, features),
            self._heads(m, "value", value_heads, value_width),
            self._terms(m, "memory_logits", self.dynamic_memory_logits, (key_heads, heads)),
            self._terms(m, "memory_weights", self.dynamic_memory_weights, (heads, value_heads)),
        )

    def _heads(self, x: Array, name: str, heads: int, width: int) -> Array:
        y = projection(heads * width, name, self.dtype, self.param_dtype)(x)
        return y.reshape(*x.shape[:2], heads, width)

    def _rotated(self, x: Float[Array, "B T H K"], start, features: int) -> Array:
        if not self.rotary:
            return x
        check_even(x.shape[-1], features, x.shape[-2])
        return rotary(x, start + jnp.arange(x.shape[1]))

    def _terms(self, x: Array, side: str, wanted: bool, shape: tuple[int, int]) -> Array | None:
        """The dynamic terms (B, T, *shape) of one side: a linear map of its rows."""
        if not wanted:
            return None
        dense = nn.Dense(
            shape[0] * shape[1],
            use_bias=False,
            kernel_init=nn.initializers.normal(self.dynamic_scale * x.shape[-1] ** -0.5),
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            name=f"dynamic_{side}",
        )
        return dense(x).reshape(*x.shape[:2], *shape)

    def _mixing(self, name: str, shape: tuple[int, int]) -> Array | None:
        wanted = self.mix_logits if name == "pre_mixing" else self.mix_weights
        if not wanted:
            return None
        init = mixing_initializer(self.mixing_init, *shape)
        return self.param(name, init, shape, self.param_dtype)

    def _position_bias(
        self, queries: int, keys: int, start, times: Int[Array, " S"] | None, cross: bool
    ) -> Array | None:
        """(H, T, S): the learned bias of each offset between a query's time and a key's."""
        if not self.position_bias:
            return None
        if cross:
            raise UsageError("position_bias=True with memory: two sequences share no positions")
        if self.max_length is None or self.max_length < 1:
            raise UsageError(
                f"position_bias=True with max_length={self.max_length}: set how far it reaches"
            )
        shape = (self._counts()[1], self.max_length)
        table = self.param("position_bias", nn.initializers.zeros, shape, self.param_dtype)
        when = jnp.arange(keys) if times is None else times
        offset = jnp.abs(start + jnp.arange(queries)[:, None] - when[None])
        return table[:, jnp.minimum(offset, self.max_length - 1)]


def _width(width: int | None, features: int, heads: int, what: str) -> int:
    if width is not None:
        if width < 1:
            raise UsageError(f"{what}_width={width}: choose at least 1")
        return width
    if features < heads:
        raise UsageError(
            f"{what}_heads={heads} share features={features}: choose fewer heads or more features, "
            f"or set {what}_width"
        )
    return features // heads


def _dynamic(query: Array | None, memory: Array | None) -> ops.DynamicMixing | None:
    return None if query is None and memory is None else ops.DynamicMixing(query, memory)
