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

from jax_extractor.errors import InputError, UsageError, unknown_name
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
      UsageError: a method that does not exist, repeats below 1, or a dtype that is not floating.
    """
    if repeats < 1:
        raise UsageError(f"repeats={repeats}: choose at least 1")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise UsageError(f"dtype={np.dtype(dtype).name}: give a floating dtype, such as float32")
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
    key = auto.shape_key(x_shape, w_shape, x.dtype)  # float64 is float32 without x64
    auto.measured[key] = min(medians, key=lambda method: medians[method])
    return medians


def save_tuning(path) -> None:
    """Writes the choices measured so far as JSON, for `load_tuning` in another process.

    Raises:
      InputError: the file cannot be written.
    """
    rows = [[*key, method] for key, method in auto.measured.items()]
    try:
        pathlib.Path(path).write_text(json.dumps(rows, indent=1) + "\n")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}: choose another file") from error


def load_tuning(path) -> None:
    """Adds the choices of a file written by `save_tuning`.

    Raises:
      InputError: the file is not there or is not such a file; nothing of it is taken then.
    """
    try:
        rows = json.loads(pathlib.Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"tuning file {path} cannot be read: {error}") from error
    if not isinstance(rows, list) or not all(map(_is_choice, rows)):
        raise InputError(
            f"tuning file {path} cannot be read: it is no list of [platform, x shape, w shape, "
            "dtype, method]: write it with save_tuning"
        )
    for platform, x_shape, w_shape, dtype, method in rows:
        auto.measured[platform, tuple(x_shape), tuple(w_shape), dtype] = method


def _is_choice(row) -> bool:
    """Whether a value from JSON is a row that `save_tuning` writes."""
    if not isinstance(row, list) or len(row) != 5 or row[4] not in METHODS:
        return False
    shapes = all(isinstance(s, list) and all(type(n) is int for n in s) for s in row[1:3])
    return shapes and all(isinstance(name, str) for name in (row[0], row[3]))
