"""The spectral method's own business: blocks, chunks, lanes, parts, windows, precision, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_extractor.ops import causal_extract, spectral_plan
from jax_extractor.ops.dft import Dft
from jax_extractor.ops.spectral import (
    input_cotangent,
    matrix_extract,
    output,
    weight_cotangent,
)
from jax_extractor.ops.spectral_plan import (
    Plan,
    block_length,
    largest_divisor,
    make_plan,
    multiplications,
    share_spectrum,
)

pytestmark = pytest.mark.core


def draw(*shapes, dtype=np.float32):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def exact(x, w):
    """In float64, by numpy's FFT; x (B, T, D), w (L, D, E) or (L, D) or (L,)."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    n = x.shape[1] + w.shape[0]
    x_hat, w_hat = np.fft.rfft(x, n, axis=1), np.fft.rfft(w, n, axis=0)
    if w.ndim == 3:
        y_hat = np.einsum("bfd,fde->bfe", x_hat, w_hat)
    else:
        y_hat = x_hat * (w_hat if w.ndim == 2 else w_hat[:, None])
    return np.fft.irfft(y_hat, n, axis=1)[:, : x.shape[1]]


def relative(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.abs(actual - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("time", [24, 40])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(Dft(8, 3), 24, chunk=5),  # one block, all features at once
        Plan(Dft(9, 1), 24, chunk=2),  # blocks that L does not fill, a chunk left over
        Plan(Dft(4, 2), 24, chunk=4, lanes=2),  # three blocks, two lanes, a rest
        Plan(Dft(4, 2), 24, chunk=1, lanes=3),
        Plan(Dft(5, 3), 24, chunk=5, parts=2),  # two blocks, parts of unequal size
        Plan(Dft(7, 1), 24, chunk=2, lanes=2, parts=3),
    ],
)
def test_every_plan_gives_the_same_values_and_gradients(plan, time, x64):
    plan = plan._replace(dtype=jnp.dtype(jnp.float64))
    x, w, cotangent = draw((2, time, 5), (24, 5, 3), (2, time, 3), dtype=np.float64)
    direct = functools.partial(causal_extract, method="conv")

    @jax.jit
    def both(x, w, cotangent):
        results = []
        for f in (functools.partial(matrix_extract, plan=plan), direct):
            y, pull_back = jax.vjp(f, x, w)
            results.append((y, *pull_back(cotangent)))
        return results

    for ours, reference in zip(*both(x, w, cotangent), strict=True):
        np.testing.assert_allclose(ours, reference, atol=1e-12)


@pytest.mark.parametrize("form", [(4096, 4, 3), (4096, 4), (4096,)])
def test_float32_at_4096_is_within_1e_5_of_float64(form):
    x, w, cotangent = draw((1, 4096, 4), form, (1, 4096, form[2] if len(form) == 3 else 4))

    @jax.jit
    def run(x, w, cotangent):
        y, pull_back = jax.vjp(functools.partial(causal_extract, method="auto"), x, w)
        return y, *pull_back(cotangent)

    y, dx, dw = run(x, w, cotangent)
    assert relative(y, exact(x, w)) < 1e-5
    # The transposes: reversed in time, dx is an extraction of the cotangent, dw a correlation.
    back = np.asarray(cotangent)[:, ::-1]
    flipped = np.swapaxes(w, 1, 2) if len(form) == 3 else w
    assert relative(dx, exact(back, flipped)[:, ::-1]) < 1e-5
    if len(form) == 3:
        n = 2 * 4096
        spectra = (np.fft.rfft(np.asarray(a, np.float64)[0], n, axis=0) for a in (x, cotangent))
        x_hat, y_hat = spectra
        expected = np.fft.irfft(np.conj(x_hat)[:, :, None] * y_hat[:, None], n, axis=0)[:4096]
        assert relative(dw, expected) < 1e-5


def test_bfloat16_is_transformed_in_float32():
    """Early positions, which suffer first, are as good as late ones: only the result is rounded."""
    x, w = draw((1, 1024, 4), (1024, 4, 4), dtype=jnp.bfloat16)
    y = jax.jit(functools.partial(causal_extract, method="spectral"))(x, w)
    expected = exact(x.astype(jnp.float32), w.astype(jnp.float32))
    error = np.abs(np.asarray(y, np.float64) - expected)[0]
    size = np.abs(expected)[0]
    for positions in (slice(0, 32), slice(512, 1024)):
        assert (error[positions] <= 2**-8 * size[positions] + 2e-4).all()
        assert np.sqrt((error[positions] ** 2).mean() / (size[positions] ** 2).mean()) < 2.5e-3


def test_cotangents_of_bfloat16_are_rounded_once():
    """The parts of the frequencies are added before."""
    x, w = draw((2, 40, 6), (40, 6, 5), dtype=jnp.bfloat16)
    (y,) = draw((2, 40, 5))
    plan = Plan(Dft(10, 4), 40, chunk=6, parts=2)

    def cotangents(dtype):
        extract = functools.partial(matrix_extract, plan=plan._replace(dtype=jnp.dtype(dtype)))
        return jax.vjp(extract, x.astype(dtype), w.astype(dtype))[1](y)

    for narrow, wide in zip(cotangents(jnp.bfloat16), cotangents(jnp.float32), strict=True):
        assert narrow.dtype == jnp.bfloat16
        error, size = np.abs(narrow.astype(jnp.float32) - wide), np.abs(wide)
        half_a_step = 2.0 ** (np.floor(np.log2(size)) - 8)
        assert (error <= half_a_step + 1e-5 * size.max()).all()


def test_both_directions_share_the_transform_of_the_weights():
    """As XLA counts: what is saved is one transform of w, and those of x and y, which are small."""
    x, w, y = draw((1, 64, 160), (64, 160, 8), (1, 64, 8))
    plan = make_plan(x.shape, w.shape, None)
    assert plan.chunk < 160
    plan = share_spectrum(plan, x.shape, w.shape)
    assert plan.chunk == 160

    def operations(f, *arguments):
        return jax.jit(f).lower(*arguments).compile().cost_analysis()["flops"]

    def both(x, w, ybar):
        y, pull_back = jax.vjp(functools.partial(causal_extract, method="spectral"), x, w)
        return y, pull_back(ybar)

    apart = sum(
        operations(functools.partial(f, plan=plan), *arguments)
        for f, arguments in (
            (output, (x, w)),
            (input_cotangent, (y, w)),
            (weight_cotangent, (x, y)),
        )
    )
    transform = 2 * w.size * plan.dft.multiplications
    assert transform < apart - operations(both, x, w, y) < 2 * transform


def test_nothing_is_shared_where_one_cotangent_alone_is_wanted():
    x, w = draw((1, 64, 160), (64, 160, 8))
    plan = make_plan(x.shape, w.shape, None)

    def chunks(arguments):
        loss = lambda x, w: (matrix_extract(x, w, plan) ** 2).sum()  # noqa: E731
        equations = jax.make_jaxpr(jax.grad(loss, arguments))(x, w).eqns
        return {e.params["plan"].chunk for e in equations if "spectral" in e.primitive.name}

    assert chunks(0) == chunks(1) == {plan.chunk}
    assert chunks((0, 1)) == {160} != {plan.chunk}


def test_no_array_of_the_size_of_the_weights_spectrum_is_kept(monkeypatch):
    """Forward and backward, the temporary memory stays below the weights' own size."""
    monkeypatch.setattr(spectral_plan, "CHUNK_BYTES", 1 << 18)
    monkeypatch.setattr(spectral_plan, "SHARED_BYTES", 1 << 18)
    x, w = draw((1, 256, 64), (256, 64, 64))
    extract = functools.partial(causal_extract, method="spectral")
    gradient = jax.jit(jax.grad(lambda x, w: extract(x, w).sum(), (0, 1)))
    memory = gradient.lower(x, w).compile().memory_analysis()
    assert memory.temp_size_in_bytes < w.nbytes


def test_no_complex_numbers_and_no_fft():
    x, w = draw((2, 64, 4), (64, 4, 4))
    extract = functools.partial(causal_extract, method="spectral")
    text = jax.jit(jax.grad(lambda x, w: extract(x, w).sum(), (0, 1))).lower(x, w).as_text()
    assert "complex" not in text
    assert "fft" not in text


def test_a_window_is_not_padded_to_the_time():
    plan = make_plan((2, 4096, 8), (64, 8, 8), None)
    assert 64 <= plan.dft.points * plan.w_blocks <= 72


def test_longer_contexts_get_more_blocks():
    assert block_length((32, 256, 128), 256) == 256
    assert block_length((2, 4096, 64), 4096) == 512


@pytest.mark.parametrize("sizes", [(3, 64, 64, 4, 6), (1, 1024, 1024, 2, 4), (2, 900, 512, 4, 2)])
def test_each_map_multiplies_as_often_as_the_formula_says(sizes):
    batch, time, length, features, outputs = sizes
    x, w, y = draw((batch, time, features), (length, features, outputs), (batch, time, outputs))
    plan = make_plan(x.shape, w.shape, None)
    for function, arguments in (
        (output, (x, w)),
        (input_cotangent, (y, w)),
        (weight_cotangent, (x, y)),
    ):
        equations = jax.make_jaxpr(functools.partial(function, plan=plan))(*arguments).eqns
        products = 0
        for equation in equations:
            if equation.primitive.name == "dot_general":
                (contracted, _), _ = equation.params["dimension_numbers"]
                terms = np.prod([equation.invars[0].aval.shape[axis] for axis in contracted])
                products += int(terms * equation.outvars[0].aval.size)
        assert products == multiplications(x.shape, w.shape)


@pytest.mark.parametrize("n, limit, expected", [(128, 48, 32), (97, 16, 16), (30, 7, 6), (8, 8, 8)])
def test_chunks_divide_the_features_where_they_can(n, limit, expected):
    assert largest_divisor(n, limit) == expected
