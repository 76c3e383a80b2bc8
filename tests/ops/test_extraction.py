"""Every method of the extraction sum, against golden values, the equation and its properties."""

import functools
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_extractor.errors import UsageError
from jax_extractor.ops import causal_extract, extraction_factor
from jax_extractor.ops.extraction import METHODS

pytestmark = pytest.mark.core

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "golden" / "extraction.npz")
CASES = sorted({key.rsplit("/", 1)[0] for key in GOLDEN})
ALL = ["auto", *METHODS]
LAST_BIT = ["scan", "toeplitz", "conv"]
FORMS = {
    "matrix": lambda n, d: (n, d, d + 1),
    "channel": lambda n, d: (n, d),
    "scalar": lambda n, d: (n,),
}


def draw(*shapes, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def by_the_equation(x, w, scale=None):
    """The double loop in float64."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    matrix, length = w.ndim == 3, len(w)
    y = np.zeros((*x.shape[:-1], w.shape[2] if matrix else x.shape[-1]))
    for i in range(x.shape[-2]):
        for j in range(max(0, i - length + 1), i + 1):
            y[..., i, :] += x[..., j, :] @ w[i - j] if matrix else x[..., j, :] * w[i - j]
        if scale == "rsqrt":
            y[..., i, :] /= np.sqrt(min(i + 1, length))
    return y


def assert_relative(actual, expected, tolerance):
    """The largest difference, relative to the largest value."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


def value_and_gradients(case, method, dtype):
    scale = case.split("/")[1]
    x, w, cotangent = (
        jnp.asarray(GOLDEN[f"{case}/{key}"], dtype) for key in ("x", "w", "cotangent")
    )
    extract = functools.partial(
        causal_extract, scale=None if scale == "none" else scale, method=method
    )

    @jax.jit
    def run(x, w, cotangent):
        y, pull_back = jax.vjp(extract, x, w)
        return y, *pull_back(cotangent)

    return dict(zip(("y", "dx", "dw"), run(x, w, cotangent), strict=True))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", ALL)
def test_golden_values_and_gradients(method, case):
    for key, value in value_and_gradients(case, method, jnp.float32).items():
        assert value.dtype == jnp.float32
        assert_relative(value, GOLDEN[f"{case}/{key}"], 1e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", ALL)
def test_golden_values_and_gradients_in_float64(method, case, x64):
    for key, value in value_and_gradients(case, method, jnp.float64).items():
        assert value.dtype == jnp.float64
        assert_relative(value, GOLDEN[f"{case}/{key}"], 1e-10)


def test_the_wrong_reading_is_told_apart():
    """x_j meets W_{i-j+1}; the reading in which x_j meets W_j is far from every golden case."""
    for case in ("square/none", "rectangular/none", "short/none"):
        x, w, y = (GOLDEN[f"{case}/{key}"] for key in "xwy")
        wrong = np.cumsum(np.einsum("btd,tde->bte", x, w[: x.shape[1]]), axis=1)
        assert np.abs(wrong - y).max() > 0.1 * np.abs(y).max()


@pytest.mark.parametrize("method", ALL)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    time=st.integers(1, 33),
    length=st.integers(1, 33),
    features=st.integers(1, 5),
    leading=st.sampled_from([(), (1,), (3,), (2, 2)]),
    form=st.sampled_from(list(FORMS)),
    scale=st.sampled_from([None, "rsqrt"]),
)
def test_any_shape_follows_the_equation(method, time, length, features, leading, form, scale):
    x, w = draw((*leading, time, features), FORMS[form](length, features))
    extract = jax.jit(functools.partial(causal_extract, scale=scale, method=method))
    assert_relative(extract(x, w), by_the_equation(x, w, scale), 1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("time", [16, 24])
def test_causal(method, form, time):
    x, w = draw((2, time, 3), FORMS[form](16, 3))
    other = x.at[:, 9:].add(10.0)
    extract = jax.jit(functools.partial(causal_extract, method=method))
    y, y_other = extract(x, w), extract(other, w)
    assert np.abs(np.asarray(y[:, 9:] - y_other[:, 9:])).min() > 0
    if method in LAST_BIT:
        np.testing.assert_array_equal(y[:, :9], y_other[:, :9])
    else:
        np.testing.assert_allclose(y[:, :9], y_other[:, :9], atol=2e-4)


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("scale", [None, "rsqrt"])
@pytest.mark.parametrize("length", [6, 12])
def test_left_padding_changes_nothing(method, scale, length):
    x, w = draw((2, 9, 3), (length, 3, 4))
    padding = np.array([0, 3])
    padded = jnp.stack([jnp.pad(r, ((p, 3 - p), (0, 0))) for r, p in zip(x, padding, strict=True)])
    valid = np.arange(12) - padding[:, None]
    valid = jnp.asarray((valid >= 0) & (valid < 9))
    garbage = jnp.where(valid[..., None], padded, jnp.nan)
    extract = jax.jit(functools.partial(causal_extract, scale=scale, method=method))
    y, plain = extract(garbage, w, valid=valid), extract(x, w)
    for row, p in enumerate(padding):
        assert_relative(y[row, p : p + 9], plain[row], 2e-6)


@pytest.mark.parametrize("method", ALL)
def test_zero_vectors_in_front_change_nothing_without_the_factor(method):
    x, w = draw((2, 9, 3), (14, 3, 3))
    y = causal_extract(jnp.pad(x, ((0, 0), (5, 0), (0, 0))), w, method=method)
    assert_relative(y[:, 5:], causal_extract(x, w, method=method), 2e-6)
    np.testing.assert_allclose(y[:, :5], 0, atol=1e-5)


def test_the_factor_counts_real_vectors_in_the_window():
    valid = jnp.asarray([[0, 0, 1, 1, 0, 1, 1, 1]], bool)
    counts = np.array([1, 1, 1, 2, 2, 2, 2, 3])
    np.testing.assert_allclose(
        extraction_factor(8, 3, valid=valid)[0], 1 / np.sqrt(counts), rtol=1e-6
    )
    np.testing.assert_allclose(extraction_factor(5, 3), 1 / np.sqrt([1, 2, 3, 3, 3]), rtol=1e-6)


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("dtype, unit", [(jnp.bfloat16, 2**-8), (jnp.float16, 2**-11)])
def test_halves_are_summed_in_float32(method, dtype, unit):
    """Only the result is rounded, once, however many terms are summed."""
    x, w = draw((1, 256, 4), (256, 4, 4), dtype=dtype)
    y = causal_extract(x, w, method=method, scale="rsqrt")
    assert y.dtype == dtype
    exact = by_the_equation(x.astype(jnp.float32), w.astype(jnp.float32), "rsqrt")
    error = np.abs(np.asarray(y, np.float64) - exact)
    assert (error <= 1.001 * unit * np.abs(exact) + 1e-5).all()


def test_the_result_has_the_promoted_dtype():
    x, w = draw((1, 4, 2), (4, 2, 2))
    assert causal_extract(x.astype(jnp.bfloat16), w).dtype == jnp.float32
    assert causal_extract(x, w.astype(jnp.bfloat16)).dtype == jnp.float32


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", METHODS)
def test_transformations(method, form):
    """jit, vmap over x and over w, jvp and checkpointed gradients agree with the plain function."""
    arguments = draw((3, 7, 4), FORMS[form](7, 4), (3, 7, 4), FORMS[form](7, 4))
    extract = functools.partial(causal_extract, method=method, scale="rsqrt")
    plain = extract(*arguments[:2])

    def squares(f):
        return jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2), (0, 1))

    @jax.jit
    def everything(x, w, dx, dw):
        """Pairs that should agree, with their tolerance."""
        y = extract(x, w)
        both = jax.vmap(extract)(jnp.stack([x, dx]), jnp.stack([w, dw]))
        out, tangent = jax.jvp(extract, (x, w), (dx, dw))
        scan = functools.partial(extract, method="scan")
        # Second derivatives, forward over reverse.
        second, reference = (jax.jvp(squares(f), (x, w), (dx, dw))[1] for f in (extract, scan))
        return {
            "jit": (y, plain, 2e-6),
            "vmap over x": (jax.vmap(extract, (0, None))(x, w), y, 2e-6),
            "vmap over both": (both[1], extract(dx, dw), 2e-6),
            "jvp": (out, y, 2e-6),
            "tangent": (tangent, extract(dx, w) + extract(x, dw), 5e-6),  # bilinear
            "checkpoint": (squares(jax.checkpoint(extract))(x, w), squares(extract)(x, w), 5e-6),
            "second derivatives": (second, reference, 5e-6),
        }

    for found, expected, tolerance in everything(*arguments).values():
        jax.tree.map(lambda a, b: assert_relative(a, b, float(tolerance)), found, expected)  # noqa: B023


def test_traced_once_for_one_shape():
    x, w = draw((2, 8, 3), (8, 3, 3))
    extract = jax.jit(chex.assert_max_traces(causal_extract, n=1))
    first, second = extract(x, w), extract(2 * x, w)
    assert_relative(second, 2 * first, 1e-6)


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3)])
def test_empty_input_gives_empty_output(method, shape):
    (w,) = draw((4, 3, 2))
    assert causal_extract(jnp.zeros(shape), w, method=method).shape == (*shape[:2], 2)


def test_scan_keeps_no_shifted_copies_for_the_backward_pass():
    """Temporary memory stays near a few copies of x, not L copies of it."""
    x, w = draw((2, 128, 16), (128, 16, 16))
    gradient = jax.jit(jax.grad(lambda x, w: causal_extract(x, w, method="scan").sum()))
    temporary = gradient.lower(x, w).compile().memory_analysis().temp_size_in_bytes
    assert temporary < 12 * x.nbytes + 2 * w.nbytes


@pytest.mark.parametrize(
    "x, w, options, message",
    [
        ((2, 4, 3), (4, 5, 3), {}, "w has 5 input features and x has 3"),
        ((4,), (4,), {}, "at least two axes"),
        ((2, 4, 3), (4, 3, 3, 3), {}, "(L, D, E), (L, D) or (L,)"),
        ((2, 4, 3), (0, 3), {}, "L >= 1"),
        ((2, 4, 3), (4, 3), {"scale": "sqrt"}, "choose None or 'rsqrt'"),
        ((2, 4, 3), (4, 3), {"method": "magic"}, "auto, conv, fft"),
        ((2, 4, 3), (4, 3), {"valid": jnp.ones((2, 5), bool)}, "valid has shape (2, 5)"),
        ((2, 4, 3), (4, 3), {"valid": jnp.ones((3, 4), bool)}, "valid has shape (3, 4)"),
        ((2, 4, 3), (4, 3), {"valid": jnp.ones((2, 4))}, "valid has dtype float32"),
    ],
)
def test_bad_arguments_get_a_clear_line(x, w, options, message):
    with pytest.raises(UsageError) as error:
        causal_extract(jnp.zeros(x), jnp.zeros(w), **options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_integers_are_refused():
    with pytest.raises(UsageError, match="x has dtype int32"):
        causal_extract(jnp.zeros((2, 4, 3), jnp.int32), jnp.zeros((4, 3)))
