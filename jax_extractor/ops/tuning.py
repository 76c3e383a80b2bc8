"""Measuring the methods of the extraction sum, in place of the rule of `auto`."""

import functools
import json
import pathlib
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jax_extractor.errors import InputError, unknown_name
from jax_extractor.ops import auto
from jax_extractor.ops.extraction import METHODS, causal_extract


def tune(
    x_shape, w_shape, *, dtype=jnp.float32, methods=None, gradient: bool = True, repeats: int = 5
) -> dict[str, float]:
    """Measures every method on this device and makes "auto" take the fastest for these shapes.

    Shapes: x_shape (..., T, D); w_shape (L, D, E), (L, D) or (L,). Returns the median seconds of
    `repeats` calls per method (forward, and backward if `gradient`), methods interleaved. Functions
    compiled before keep the method they were compiled with.

    Raises:
      UsageError: a method that does not exist.
    """
    methods = list(methods or METHODS)
    for method in methods:
        if method not in METHODS:
            raise unknown_name("method", method, METHODS)
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in (x_shape, w_shape))
    calls = {}
    for method in methods:
        extract = functools.partial(causal_extract, method=method)
        program: Callable = extract
        if gradient:
            program = jax.grad(lambda x, w, f=extract: jnp.sum(f(x, w)), (0, 1))
        calls[method] = jax.jit(program)
        jax.block_until_ready(calls[method](x, w))
    times: dict[str, list[float]] = {method: [] for method in methods}
    for _ in range(repeats):
        for method, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call(x, w))
            times[method].append(time.perf_counter() - start)
    medians = {method: statistics.median(values) for method, values in times.items()}
    key = auto.shape_key(x_shape, w_shape, dtype)
    auto.measured[key] = min(medians, key=lambda method: medians[method])
    return medians


def save_tuning(path) -> None:
    """Writes the choices measured so far as JSON, for `load_tuning` in another process."""
    rows = [[*key, method] for key, method in auto.measured.items()]
    pathlib.Path(path).write_text(json.dumps(rows, indent=1) + "\n")


def load_tuning(path) -> None:
    """Adds the choices of a file written by `save_tuning`.

    Raises:
      InputError: the file is not there or is not such a file.
    """
    try:
        for platform, x_shape, w_shape, dtype, method in json.loads(pathlib.Path(path).read_text()):
            if method not in METHODS:
                raise unknown_name("method", method, METHODS)
            auto.measured[platform, tuple(x_shape), tuple(w_shape), dtype] = method
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"tuning file {path} cannot be read: {error}") from error
