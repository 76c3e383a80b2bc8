"""Multi-head attention against Flax's own, a float64 loop, and rotary's defining property."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_extractor.errors import UsageError
from jax_extractor.mixers import MultiHeadAttention
from jax_extractor.mixers.common import rotary

pytestmark = pytest.mark.core


jit_rotary = jax.jit(rotary)


def as_flax(params, heads):
    """Our parameters in the layout of nn.MultiHeadDotProductAttention."""
    d = params["query"]["kernel"].shape[0]
    shapes = {name: (d, heads, d // heads) for name in ("query", "key", "value")}
    shapes["output"] = (heads, d // heads, d)
    names = {"output": "out"}
    return {
        names.get(name, name): {"kernel": params[name]["kernel"].reshape(shape)}
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize(("causal", "padded"), [(True, True), (False, True), (True, False)])
def test_equals_flax_attention_in_values_and_gradients(causal, padded):
    heads, (b, t, d) = 3, (2, 7, 12)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(b, t, d)), jnp.float32)
    # Left padding; only the real rows are compared: Flax spreads a row that sees nothing evenly.
    start = np.array([2, 0]) if padded else np.zeros(2, int)
    valid = jnp.asarray(np.arange(t) >= start[:, None])
    ours = MultiHeadAttention(num_heads=heads, causal=causal)
    params = jax.jit(ours.init)(jax.random.key(1), x)["params"]
    theirs = nn.MultiHeadDotProductAttention(
        num_heads=heads, qkv_features=d, out_features=d, use_bias=False
    )
    mask = valid[:, None, None, :]
    if causal:
        mask &= jnp.tri(t, dtype=bool)
    weights = jnp.where(valid[..., None], jnp.cos(x), 0)

    def our_sum(params, x):
        y = ours.apply({"params": params}, x, valid if padded else None)
        return jnp.sum(y * weights), y

    def their_sum(params, x):
        y = theirs.apply({"params": as_flax(params, heads)}, x, mask=mask)
        return jnp.sum(y * weights), y

    grads, y = jax.jit(jax.grad(our_sum, (0, 1), has_aux=True))(params, x)
    expected_grads, expected = jax.jit(jax.grad(their_sum, (0, 1), has_aux=True))(params, x)
    np.testing.assert_allclose(y[valid], expected[valid], rtol=1e-5, atol=1e-6)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def loop(params, x, heads, *, causal, rotate):
    """Attention in float64, a softmax at a time; rotary as multiplication by e^{ipθ}."""
    w = {name: np.asarray(leaf["kernel"], np.float64) for name, leaf in params.items()}
    width = x.shape[-1] // heads
    out = np.zeros_like(x)
    for b, h in np.ndindex(len(x), heads):
        cut = slice(h * width, (h + 1) * width)
        q, k, v = (x[b] @ w[name][:, cut] for name in ("query", "key", "value"))
        if rotate:
            q, k = turn(q), turn(k)
        for i in range(len(q)):
            seen = i + 1 if causal else len(q)
            weights = np.exp(k[:seen] @ q[i] / np.sqrt(width))
            out[b, i, cut] = weights / weights.sum() @ v[:seen]
    return out @ w["output"]


def turn(x):
    """Row p of (T, K), its pairs (x_k, x_{k+K/2}) read as complex numbers, turned by p·θ_k."""
    half = x.shape[1] // 2
    theta = 10_000.0 ** (-2 * np.arange(half) / x.shape[1])
    z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * np.outer(np.arange(len(x)), theta))
    return np.concatenate([z.real, z.imag], axis=1)


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_equals_the_loop_in_float64(x64, causal, rotate):
    x = np.random.default_rng(0).normal(size=(2, 6, 8))
    mixer = MultiHeadAttention(num_heads=2, causal=causal, rotary=rotate, param_dtype=jnp.float64)
    out, variables = jax.jit(mixer.init_with_output)(jax.random.key(1), jnp.asarray(x))
    params = variables["params"]
    expected = loop(params, x, 2, causal=causal, rotate=rotate)
    np.testing.assert_allclose(out, expected, rtol=1e-10, atol=1e-12)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(p=st.integers(0, 500), s=st.integers(0, 500), shift=st.integers(0, 500))
def test_rotary_scores_depend_on_the_distance_alone(p, s, shift):
    with jax.enable_x64(True):
        q, k = jnp.asarray(np.random.default_rng(0).normal(size=(2, 1, 1, 1, 8)))

        def score(p, s):
            return float(np.vdot(jit_rotary(q, jnp.asarray([p])), jit_rotary(k, jnp.asarray([s]))))

        np.testing.assert_allclose(score(p + shift, s + shift), score(p, s), atol=1e-11)


def test_rotary_of_positions_per_row_and_in_bfloat16():
    x = np.random.default_rng(0).normal(size=(2, 5, 3, 4)).astype(np.float32)
    positions = jnp.asarray([[0, 1, 2, 3, 4], [7, 9, 200, 3, 0]])
    halves = jnp.asarray(x, jnp.bfloat16)
    turned = jit_rotary(halves.astype(jnp.float32), positions)
    for b in range(2):
        row = jit_rotary(halves[b : b + 1].astype(jnp.float32), positions[b])
        np.testing.assert_allclose(turned[b], row[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(turned[0, 0], halves[0, 0].astype(jnp.float32), rtol=1e-6)
    rounded = jit_rotary(halves, positions)  # one rounding, at the end
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_allclose(rounded.astype(jnp.float32), turned, rtol=2**-8, atol=1e-6)


def test_rotary_tells_the_order_and_plain_attention_does_not():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 6, 8)), jnp.float32)
    swapped = x[:, jnp.asarray([1, 0, 2, 3, 4, 5])]
    for rotate in (False, True):
        mixer = MultiHeadAttention(num_heads=2, rotary=rotate)
        y, variables = jax.jit(mixer.init_with_output)(jax.random.key(1), x)
        other = jax.jit(mixer.apply)(variables, swapped)
        assert np.allclose(y[0, -1], other[0, -1], atol=1e-5) is not rotate


@pytest.mark.parametrize(("d", "heads"), [(8, 2), (12, 12)])
def test_four_square_matrices(d, heads):
    mixer = MultiHeadAttention(num_heads=heads)
    x = jax.ShapeDtypeStruct((1, 2, d), jnp.float32)
    params = jax.eval_shape(mixer.init, jax.random.key(0), x)["params"]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 4 * d**2


@pytest.mark.parametrize(
    ("features", "fields", "message"),
    [
        (130, {"num_heads": 8}, "features=130 is not divisible by num_heads=8: choose 128 or 136"),
        (6, {"num_heads": 8}, "features=6 is not divisible by num_heads=8: choose 8"),
        (8, {"num_heads": 0}, "num_heads=0: choose at least 1"),
        (
            6,
            {"num_heads": 2, "rotary": True},
            r"rotary positions turn pairs, but a head is 3 wide \(features=6, num_heads=2\)",
        ),
    ],
)
def test_sizes_that_do_not_fit(features, fields, message):
    with pytest.raises(UsageError, match=message):
        MultiHeadAttention(**fields).init(jax.random.key(0), jnp.zeros((1, 3, features)))
