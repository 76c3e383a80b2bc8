"""The transforms of W made once and read by many calls, such as the micro-batches of one step.

`causal_extract` transforms its weights in every call, which for a few short sequences costs more
than the products. Transforming is linear, so gradients may be added up as gradients of the transform
and brought back once, by the transposed map that `jax.vjp` of `transform_weights` gives. A step of
four micro-batches of 4 sequences (iSHE, 2 layers, D = 128, L = 256) takes 466 ms so, 512 ms with a
transform for each (2-core x86-64 CPU, jax 0.10.2, medians of five runs in turns).
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_extractor.errors import UsageError
from jax_extractor.ops.extraction_methods import accumulation_dtype, resolve_precision
from jax_extractor.ops.spectral import (
    per_frequency,
    spectrum_transposed,
    w_matrix,
    x_matrix,
    x_spectrum,
)
from jax_extractor.ops.spectral_plan import Plan, make_plan, share_spectrum
from jax_extractor.shapes import Array, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightSpectrum:
    """What `transform_weights` makes of w (L, D, E); `causal_extract` takes it in w's place.

    It holds about twice as many numbers as w, in float32 at least.
    """

    matrices: Any
    """Arrays (F, rows, E), one for each part of the frequencies F: the transforms of all blocks."""
    plan: Plan = dataclasses.field(metadata={"static": True})
    time: int = dataclasses.field(metadata={"static": True})
    """T, the length of the sequences it is made for."""
    shape: tuple[int, int, int] = dataclasses.field(metadata={"static": True})
    """(L, D, E)."""
    dtype: jnp.dtype = dataclasses.field(metadata={"static": True})
    """w's dtype."""

    @property
    def ndim(self) -> int:
        """3: a matrix per offset."""
        return 3


def transform_weights(w: Array, x_shape: tuple[int, ...], *, precision=None) -> WeightSpectrum:
    """The transforms of w (L, D, E) for sequences x (..., T, D) of that shape.

    The batch may differ later, T may not. Linear in w, with derivatives of all orders.

    Args:
      precision: of the products, resolved as in `causal_extract`.

    Raises:
      UsageError: w is no matrix per offset, or does not fit the shape.
    """
    if w.ndim != 3 or 0 in w.shape or not jnp.issubdtype(w.dtype, jnp.floating):
        raise UsageError(f"w is {w.dtype}{list(w.shape)}: give floating matrices (L, D, E)")
    if len(x_shape) < 2 or x_shape[-1] != w.shape[1] or 0 in x_shape:
        raise UsageError(f"x_shape={x_shape} does not fit w {w.shape}: give (..., T, {w.shape[1]})")
    time, dtype = x_shape[-2], accumulation_dtype(w.dtype)
    # Widened once, so that the cotangents of all parts are added before they are rounded.
    cut = w[:time].astype(dtype)
    batched = math.prod(x_shape[:-2]), *x_shape[-2:]
    plan = make_plan(batched, cut.shape, resolve_precision(precision))
    plan = share_spectrum(plan, batched, cut.shape)
    matrices = tuple(w_matrix(cut, 0, w.shape[1], part, dtype) for part in plan.split())
    length, features, outputs = w.shape
    return WeightSpectrum(matrices, plan, time, (length, features, outputs), jnp.dtype(w.dtype))


def extract_with_spectrum(x: Float[Array, "B T D"], w: WeightSpectrum) -> Float[Array, "B T E"]:
    """The extraction sum of `spectral`, its weights transformed already."""

    def of_part(plan: Plan, matrices: Array) -> Array:
        x_hat = x_spectrum(x, plan)
        rows = per_frequency(x_matrix(x_hat, plan.w_blocks), matrices, 2, 1, plan)
        y_hat = rows.reshape(*x_hat.shape[:4], w.shape[2])
        return spectrum_transposed(y_hat, plan, x.shape[1]) / plan.dft.points

    return functools.reduce(jnp.add, map(of_part, w.plan.split(), w.matrices))
