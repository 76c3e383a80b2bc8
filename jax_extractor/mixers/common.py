"""What every mixer shares: checks of the call, named activations, bias-free projections."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_extractor.errors import UsageError, unknown_name
from jax_extractor.shapes import Array, Bool, Float

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "identity": lambda x: x,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
}


def activation(name: str) -> Callable[[Array], Array]:
    """The element-wise function of that name; an unknown name lists the known ones."""
    if name not in ACTIVATIONS:
        raise unknown_name("activation", name, ACTIVATIONS)
    return ACTIVATIONS[name]


def check_input(x: Array, valid: Array | None, name: str = "x") -> None:
    """Raises UsageError unless x is (B, T, D), floating, and valid, where given, is (B, T) bool."""
    if x.ndim != 3:
        raise UsageError(f"{name} has shape {x.shape}: a mixer takes (batch, time, features)")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise UsageError(f"{name} has dtype {x.dtype}: embed tokens first, a mixer takes floats")
    if valid is None:
        return
    if valid.shape != x.shape[:2]:
        raise UsageError(f"valid has shape {valid.shape}: {name} {x.shape} needs {x.shape[:2]}")
    if valid.dtype != jnp.bool_:
        raise UsageError(f"valid has dtype {valid.dtype}: pass booleans, True = real position")


def check_one_step(x: Array) -> None:
    """Raises UsageError unless x continues a cached sequence by one position."""
    if x.shape[1] != 1:
        raise UsageError(
            f"x has {x.shape[1]} positions, but the cache holds a sequence already: "
            "pass one position at a time, or a whole prompt without a cache"
        )


def check_divisible(features: int, num_heads: int) -> None:
    """Raises UsageError unless the heads share the features evenly."""
    if num_heads < 1:
        raise UsageError(f"num_heads={num_heads}: choose at least 1")
    if features % num_heads:
        below = features // num_heads * num_heads
        nearest = f"{below} or {below + num_heads}" if below else str(num_heads)
        raise UsageError(
            f"features={features} is not divisible by num_heads={num_heads}: choose {nearest}"
        )


def real_positions(valid: Bool[Array, "B T"]) -> Array:
    """Position of each real vector among the real ones, (B, T) int32; padding gets 0."""
    return jnp.maximum(jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, 0)


def check_even(width: int, features: int, num_heads: int) -> None:
    """Raises UsageError unless a head's width can be cut into pairs to rotate."""
    if width % 2:
        raise UsageError(
            f"rotary positions turn pairs, but a head is {width} wide "
            f"(features={features}, num_heads={num_heads}): choose an even width"
        )


def rotary(x: Float[Array, "B T H K"], positions: Array, base: float = 10_000.0) -> Array:
    """Rotates the pairs (x_k, x_{k+K/2}) of every head by the angle p·base^(−2k/K).

    positions is (B, T) or (T,). Source: Su et al. 2021, RoFormer.
    """
    dtype = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    half = x.shape[-1] // 2
    frequency = jnp.asarray(base, dtype) ** (-jnp.arange(half, dtype=dtype) / half)
    angle = positions.astype(dtype)[..., None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = x[..., :half].astype(dtype), x[..., half:].astype(dtype)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def compute_dtype(x: Array, dtype: DTypeLike | None, param_dtype: DTypeLike) -> jnp.dtype:
    """The dtype asked for; where none is, the one that x and the parameters promote to."""
    if dtype is not None:
        return jnp.dtype(dtype)
    with jax.numpy_dtype_promotion("standard"):  # explicit: this is the documented result dtype
        return jnp.promote_types(x.dtype, param_dtype)


def projection(
    features: int,
    name: str,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike = jnp.float32,
    use_bias: bool = False,
) -> nn.Dense:
    """y = x W with W (D, features), variance 1/D, no bias unless asked for."""
    return nn.Dense(
        features,
        use_bias=use_bias,
        kernel_init=nn.initializers.variance_scaling(1.0, "fan_in", "normal"),
        dtype=dtype,
        param_dtype=param_dtype,
        name=name,
    )
