"""What holds for every mixer, so that any of them drops into any Transformer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_extractor.errors import UsageError
from jax_extractor.mixers import make_mixer

pytestmark = pytest.mark.core

B, T, D = 3, 8, 6
EXTRACTORS = ("she", "ishe", "he", "we", "me")
MIXERS = {name: {"max_length": 4, "num_heads": 3} for name in (*EXTRACTORS, "mha")}
MIXERS |= {"mha-rotary": MIXERS["mha"] | {"rotary": True}}
TALKING = {"max_length": 4, "key_heads": 2, "heads": 3, "value_heads": 1, "position_bias": True}
DYNAMIC = ("query_logits", "memory_logits", "query_weights", "memory_weights")
MIXERS |= {
    "talking_heads": TALKING | {f"dynamic_{side}": True for side in DYNAMIC},
    "cross_modal": {"num_heads": 3, "other_heads": 2},
}
every_mixer = pytest.mark.parametrize("name", MIXERS)


def build(name, **options):
    return make_mixer(name.removesuffix("-rotary"), **MIXERS[name] | options)


def exact_options(name):
    """The option whose sum is causal, and zero of nothing, to the last bit."""
    return {"method": "scan"} if name in EXTRACTORS else {}


def variables_of(mixer, dtype=jnp.float32):
    """Parameters of unit scale, the kernels included, so that nothing vanishes in a tolerance."""
    x = jax.ShapeDtypeStruct((B, T, D), dtype)
    shapes = jax.eval_shape(mixer.init, jax.random.key(0), x)
    rng = np.random.default_rng(7)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape) / 2, p.dtype), shapes)


@functools.cache
def runner(name, **options):
    """run(x, valid) -> (y, gradients of sum(sin y) for the parameters and for x), compiled once."""
    mixer = build(name, **options)
    variables = variables_of(mixer)

    def loss(variables, x, valid):
        y = mixer.apply(variables, x, valid)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    compiled = jax.jit(jax.grad(loss, (0, 1), has_aux=True))

    def run(x, valid=None):
        (params, inputs), y = compiled(variables, jnp.asarray(x), valid)
        return y, jax.tree.leaves(params), inputs

    return run


def rows(seed=0):
    return np.random.default_rng(seed).normal(size=(B, T, D)).astype(np.float32)


def left_padded(lengths, garbage=1e6):
    """x (B, T, D) whose rows have that many real vectors at their end, and valid (B, T)."""
    valid = np.arange(T) >= T - np.asarray(lengths)[:, None]
    x = np.where(valid[..., None], rows(), np.float32(garbage))
    return jnp.asarray(x), jnp.asarray(valid)


def relative(got, expected):
    """The largest difference, in units of the largest expected value."""
    got, expected = (np.asarray(a, np.float64) for a in (got, expected))
    return np.abs(got - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize(
    ("name", "real"), [(name, 5) for name in MIXERS] + [("ishe", 3), ("mha-rotary", 3)]
)
def test_left_padding_changes_no_output_and_no_gradient(name, real):
    """5 real vectors are more than the context of 4, 3 are fewer."""
    run = runner(name)
    y, params, inputs = run(*left_padded([real] * B))
    expected, expected_params, expected_inputs = run(rows()[:, -real:])
    assert relative(y[:, -real:], expected) < 1e-5
    assert relative(inputs[:, -real:], expected_inputs) < 1e-5
    np.testing.assert_array_equal(np.asarray(inputs)[:, :-real], 0)
    for got, want in zip(params, expected_params, strict=True):
        assert relative(got, want) < 1e-5


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(MIXERS)),
    lengths=st.lists(st.integers(0, T), min_size=B, max_size=B),
)
def test_neither_the_padding_nor_another_row_is_read(name, lengths):
    """Row by row: what stands in the padding, or in another row, is not read."""
    run = runner(name)
    x, valid = left_padded(lengths)
    calm, _ = left_padded(lengths, garbage=0.0)
    mask = np.asarray(valid)
    y, expected = (np.asarray(run(z, valid)[0])[mask] for z in (x, calm))
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-6)
    row = np.asarray(run(jnp.asarray(np.asarray(x)[[1, 1, 1]]), valid[jnp.asarray([1, 1, 1])])[0])
    np.testing.assert_allclose(row[0][mask[1]], np.asarray(run(x, valid)[0])[1][mask[1]], atol=1e-6)


@every_mixer
@pytest.mark.parametrize("exact", [True, False])
def test_the_future_is_not_seen(name, exact):
    """The past does not change when vector t does; the output at t does."""
    run = runner(name, **(exact_options(name) if exact else {}))
    everything = jnp.ones((B, T), bool)
    x = rows()
    y = np.asarray(run(x, everything)[0])
    for t in (0, 3, T - 1):
        changed = np.concatenate([x[:, :t], rows(seed=1)[:, t:]], axis=1)
        other = np.asarray(run(changed, everything)[0])
        tolerance = 0 if exact else 1e-6 * np.abs(y).max()
        np.testing.assert_allclose(other[:, :t], y[:, :t], rtol=0, atol=tolerance)
        assert (np.abs(other[:, t] - y[:, t]).max(axis=-1) > 1e-2).all()


def test_attention_that_is_not_causal_sees_the_future():
    run = runner("mha", causal=False)
    change = np.zeros((B, T, D), np.float32)
    change[:, -1] = 1
    difference = np.abs(np.asarray(run(rows() + change)[0]) - np.asarray(run(rows())[0]))
    assert (difference[:, 0].max(axis=-1) > 1e-3).all()


@pytest.mark.parametrize("name", EXTRACTORS)
def test_the_window_ends_after_max_length_vectors(name):
    """x_1 reaches e_1 … e_4 with L = 4, and no later one."""
    run = runner(name, **exact_options(name))
    everything = jnp.ones((B, T), bool)
    change = np.zeros((B, T, D), np.float32)
    change[:, 0] = 1
    y, other = (np.asarray(run(x, everything)[0]) for x in (rows(), rows() + change))
    difference = np.abs(other - y).max(axis=(0, 2))
    assert (difference[:4] > 1e-3).all()
    np.testing.assert_array_equal(difference[4:], 0)


@every_mixer
def test_rows_with_nothing_to_attend_to_are_zero_and_poison_nothing(name):
    """An empty row among others: exactly 0, and the gradients are those of the others alone."""
    run = runner(name, **exact_options(name))
    y, params, inputs = run(*left_padded([0, 5, 3]))
    np.testing.assert_array_equal(np.asarray(y)[0], 0)
    np.testing.assert_array_equal(np.asarray(y)[2, :5], 0)
    assert np.abs(np.asarray(y)[1, 3:]).max(axis=-1).min() > 0
    np.testing.assert_array_equal(np.asarray(inputs)[0], 0)
    expected = run(*left_padded([0, 5, 0]))[1], run(*left_padded([0, 0, 3]))[1]
    for got, first, second in zip(params, *expected, strict=True):
        assert relative(got, np.asarray(first) + np.asarray(second)) < 1e-5


@every_mixer
def test_nothing_valid_gives_zero_and_finite_gradients_by_any_method(name):
    y, params, inputs = runner(name)(*left_padded([0, 0, 0]))
    np.testing.assert_array_equal(y, 0)
    for leaf in (*params, inputs):
        np.testing.assert_array_equal(leaf, 0)


@every_mixer
def test_bfloat16_compute_is_close_to_float32(name):
    x, everything = rows(), jnp.ones((B, T), bool)
    y, params, _ = runner(name, dtype=jnp.bfloat16)(x, everything)
    expected, expected_params, _ = runner(name)(x, everything)
    assert y.dtype == jnp.bfloat16
    assert relative(y, expected) < 2e-2
    for got, want in zip(params, expected_params, strict=True):
        assert got.dtype == jnp.float32
        # The dynamic terms make logits of four rounded factors, twice.
        assert relative(got, want) < (2e-1 if name == "talking_heads" else 6e-2)


@pytest.mark.parametrize("name", ["ishe", "mha-rotary"])
def test_float64_agrees_with_float32(x64, name):
    x = np.random.default_rng(0).normal(size=(B, T, D))
    double = build(name, param_dtype=jnp.float64)
    variables = variables_of(double, jnp.float64)
    y = jax.jit(double.apply)(variables, jnp.asarray(x))
    assert y.dtype == jnp.float64
    single = jax.tree.map(lambda p: p.astype(jnp.float32), variables)
    z = jax.jit(build(name).apply)(single, jnp.asarray(x, jnp.float32))
    assert z.dtype == jnp.float32
    assert 0 < relative(z, y) < 3e-6


@every_mixer
def test_the_dtype_of_the_result(name):
    """dtype where one is given; else what x and the parameters promote to. Called by position."""
    for x_dtype, options, expected in (
        (jnp.bfloat16, {}, jnp.float32),
        (jnp.bfloat16, {"param_dtype": jnp.bfloat16}, jnp.bfloat16),
        (jnp.float32, {"dtype": jnp.bfloat16}, jnp.bfloat16),
        (jnp.bfloat16, {"dtype": "float32"}, jnp.float32),
    ):
        mixer = build(name, **options)
        x = jax.ShapeDtypeStruct((B, T, D), x_dtype)
        valid = jax.ShapeDtypeStruct((B, T), jnp.bool_)
        variables = jax.eval_shape(mixer.init, jax.random.key(0), x)
        y = jax.eval_shape(lambda *a, m=mixer: m.apply(*a, False), variables, x, valid)
        assert (y.shape, y.dtype) == ((B, T, D), expected)


@every_mixer
@pytest.mark.parametrize(
    ("x", "valid", "message"),
    [
        ((T, D), None, r"x has shape \(8, 6\): a mixer takes \(batch, time, features\)"),
        ((1, B, T, D), None, r"x has shape \(1, 3, 8, 6\): a mixer takes"),
        ("int32", None, "x has dtype int32: embed tokens first, a mixer takes floats"),
        ((B, T, D), (B, T + 1), r"valid has shape \(3, 9\): x \(3, 8, 6\) needs \(3, 8\)"),
        ((B, T, D), (T,), r"valid has shape \(8,\): x \(3, 8, 6\) needs \(3, 8\)"),
        ((B, T, D), "float32", "valid has dtype float32: pass booleans, True = real position"),
    ],
)
def test_inputs_that_do_not_fit(name, x, valid, message):
    x = jnp.zeros((B, T, D), x) if isinstance(x, str) else jnp.zeros(x)
    if valid is not None:
        valid = jnp.ones((B, T), valid) if isinstance(valid, str) else jnp.ones(valid, bool)
    with pytest.raises(UsageError, match=message):
        build(name).init(jax.random.key(0), x, valid)
