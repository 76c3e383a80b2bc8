"""Weights transformed once: the same sum and gradients, for every micro-batch that reads them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_extractor.errors import UsageError
from jax_extractor.ops import causal_extract, transform_weights

pytestmark = pytest.mark.core


def draw(*shapes, dtype=np.float64):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


@pytest.mark.parametrize("scale", [None, "rsqrt"])
@pytest.mark.parametrize("time, length", [(9, 9), (7, 12), (300, 64), (1, 1)])
def test_sums_and_gradients_are_those_of_the_weights(time, length, scale, x64):
    xs, w, cotangent = draw((3, 2, time, 4), (length, 4, 5), (3, 2, time, 5))

    def loss(x, w, cotangent):
        return jnp.sum(causal_extract(x, w, scale=scale) * cotangent)

    @jax.jit
    def shared(w):
        """One transform for three micro-batches, forward and backward."""
        spectrum, transposed = jax.vjp(lambda w: transform_weights(w, xs.shape[1:]), w)
        grads = [jax.grad(loss, 1)(x, spectrum, c) for x, c in zip(xs, cotangent, strict=True)]
        total = jax.tree.map(lambda *parts: sum(parts), *grads)
        return causal_extract(xs[0], spectrum, scale=scale), *transposed(total)

    y, dw = shared(w)
    every = functools.partial(causal_extract, scale=scale, method="scan")
    np.testing.assert_allclose(y, every(xs[0], w), rtol=1e-11, atol=1e-11)
    expected = jax.grad(lambda w: jnp.sum(every(xs, w) * cotangent))(w)
    np.testing.assert_allclose(dw, expected, rtol=1e-11, atol=1e-11)


def test_halves_are_transformed_in_float32():
    x, w = draw((2, 40, 4), (40, 4, 4), dtype=jnp.bfloat16)
    spectrum = transform_weights(w, x.shape)
    assert {m.dtype for m in spectrum.matrices} == {jnp.dtype(jnp.float32)}
    y = causal_extract(x, spectrum)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, causal_extract(x, w, method="spectral"))


@pytest.mark.parametrize(
    "x, method, message",
    [
        ((2, 5, 4), "auto", "x has 5 vectors and w was transformed for 6"),
        ((2, 6, 3), "auto", "w has 4 input features and x has 3"),
        ((2, 6, 4), "conv", "method='conv' with transformed weights"),
    ],
)
def test_what_does_not_fit_the_transform_is_refused(x, method, message):
    spectrum = transform_weights(jnp.ones((8, 4, 4)), (2, 6, 4))
    with pytest.raises(UsageError, match=message):
        causal_extract(jnp.ones(x), spectrum, method=method)


@pytest.mark.parametrize(
    "w, x, message",
    [
        (jnp.ones((8, 4)), (2, 6, 4), "give floating matrices"),
        (jnp.ones((8, 4, 4), jnp.int32), (2, 6, 4), "give floating matrices"),
        (jnp.ones((8, 4, 4)), (2, 6, 3), "does not fit w"),
        (jnp.ones((8, 4, 4)), (4,), "does not fit w"),
    ],
)
def test_weights_that_cannot_be_transformed_are_refused(w, x, message):
    with pytest.raises(UsageError, match=message):
        transform_weights(w, x)


def test_cotangents_of_bfloat16_weights_are_rounded_once():
    """Nearly all are those without the detour, to the bit; adding rounded parts would change a third."""
    x, w, ybar = draw((2, 100, 7), (100, 7, 5), (2, 100, 5), dtype=jnp.bfloat16)

    def through_spectrum(w):
        return causal_extract(x, transform_weights(w, x.shape))

    def direct(w):
        return causal_extract(x, w, method="spectral")

    (one,), (other,) = (jax.vjp(f, w)[1](ybar) for f in (through_spectrum, direct))
    assert one.dtype == jnp.bfloat16
    assert (one == other).mean() > 0.98
