"""The Extractor and its presets against float64 loops written from the equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_extractor.errors import UsageError
from jax_extractor.mixers import HE, ISHE, ME, SHE, WE, Extractor
from jax_extractor.mixers.common import activation

pytestmark = pytest.mark.core

#: The table at the head of mixers/extractor.py: (kernel, factor 1/sqrt(i), W_v and W_o).
PRESETS = {
    SHE: ("matrix", False, False),
    ISHE: ("matrix", True, False),
    HE: ("channel", True, True),
    WE: ("head", True, True),
    ME: ("scalar", True, False),
}

ACTIVATIONS = {
    "identity": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


def loop(params, x, *, kernel, factor, length, act="identity", valid=None):
    """out (B, T, D) by one loop per sum, in float64."""
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    batch, time, features = x.shape
    valid = np.ones((batch, time), bool) if valid is None else valid
    v = x @ params["value"]["kernel"] if "value" in params else x
    adjusted = x @ params["adjust"]["kernel"] + params["adjust"].get("bias", 0)
    out = np.zeros_like(x)
    for b in range(batch):
        for i in range(1, time + 1):
            e, count = np.zeros(features), 0
            for j in range(max(1, i - length + 1), i + 1):
                if not valid[b, j - 1]:
                    continue
                w = params["kernel"][i - j]  # W_{i-j+1}, counted from 1
                if kernel == "matrix":
                    e += v[b, j - 1] @ w
                elif kernel == "head":
                    width = features // len(w)
                    e += v[b, j - 1] * np.array([w[c // width] for c in range(features)])
                else:
                    e += v[b, j - 1] * w
                count += 1
            if factor and count:
                e /= np.sqrt(count)
            out[b, i - 1] = e * ACTIVATIONS[act](adjusted[b, i - 1])
    return out @ params["output"]["kernel"] if "output" in params else out


def random_like(params, seed=0):
    """Random values for every parameter, those included that start at 0."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)


def run(mixer, x, valid=None, seed=0):
    """(params, output) of the mixer with random parameters."""
    params = random_like(jax.eval_shape(mixer.init, jax.random.key(0), x)["params"], seed)
    return params, jax.jit(mixer.apply)({"params": params}, x, valid)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_compute_their_equation(x64, preset):
    length = 10  # above T; the next test has T above L
    kernel, factor, _ = PRESETS[preset]
    x = np.random.default_rng(1).normal(size=(2, 7, 6))
    mixer = preset(max_length=length, num_heads=3, param_dtype=jnp.float64)
    params, out = run(mixer, jnp.asarray(x))
    expected = loop(params, x, kernel=kernel, factor=factor, length=length)
    assert out.dtype == jnp.float64
    np.testing.assert_allclose(out, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_count_the_real_vectors(x64, preset):
    kernel, factor, _ = PRESETS[preset]
    rng = np.random.default_rng(2)
    x, valid = rng.normal(size=(3, 8, 6)), rng.random((3, 8)) < 0.6
    mixer = preset(max_length=4, num_heads=2, param_dtype=jnp.float64)
    params, out = run(mixer, jnp.asarray(x), jnp.asarray(valid))
    expected = loop(params, x, kernel=kernel, factor=factor, length=4, valid=valid)
    np.testing.assert_allclose(out, expected, rtol=1e-10, atol=1e-12)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    kernel=st.sampled_from(["matrix", "channel", "head", "scalar"]),
    scale=st.sampled_from([None, "rsqrt"]),
    projections=st.tuples(st.booleans(), st.booleans()),
    bias=st.booleans(),
    act=st.sampled_from(sorted(ACTIVATIONS)),
    time=st.integers(1, 8),
    length=st.integers(1, 8),
)
def test_options_combine_freely(kernel, scale, projections, bias, act, time, length):
    with jax.enable_x64(True):
        x = np.random.default_rng(time).normal(size=(2, time, 4))
        mixer = Extractor(
            max_length=length,
            num_heads=2,
            kernel=kernel,
            scale=scale,
            project_values=projections[0],
            project_outputs=projections[1],
            adjust_bias=bias,
            adjust_activation=act,
            param_dtype=jnp.float64,
        )
        params, out = run(mixer, jnp.asarray(x), seed=length)
        assert ("value" in params, "output" in params) == projections
        assert ("bias" in params["adjust"]) == bias
        expected = loop(params, x, kernel=kernel, factor=bool(scale), length=length, act=act)
        np.testing.assert_allclose(out, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations_by_name(x64, act):
    x = np.linspace(-3, 3, 7)
    np.testing.assert_allclose(activation(act)(jnp.asarray(x)), ACTIVATIONS[act](x), rtol=1e-12)


@pytest.mark.parametrize("method", ["scan", "conv", "fft"])
def test_the_method_is_the_one_asked_for(method):
    mixer = ISHE(max_length=5, method=method)
    x = jax.ShapeDtypeStruct((2, 6, 4), jnp.float32)
    jaxpr = str(jax.make_jaxpr(mixer.init_with_output)(jax.random.key(0), x))
    marks = {"scan": "scan[", "conv": "conv_general", "fft": "fft["}
    assert {name for name, mark in marks.items() if mark in jaxpr} == {method}


def count(mixer, features):
    x = jax.ShapeDtypeStruct((1, 2, features), jnp.float32)
    params = jax.eval_shape(mixer.init, jax.random.key(0), x)["params"]
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(("length", "d", "heads"), [(5, 8, 2), (12, 12, 3)])
def test_parameter_counts(length, d, heads):
    expected = {
        SHE: (length + 1) * d**2,
        ISHE: (length + 1) * d**2,
        HE: 3 * d**2 + length * d,
        WE: 3 * d**2 + length * heads,
        ME: d**2 + length,
    }
    assert {p: count(p(max_length=length, num_heads=heads), d) for p in PRESETS} == expected
    assert count(ISHE(max_length=length, adjust_bias=True), d) == expected[ISHE] + d


@pytest.mark.parametrize(
    ("preset", "length", "std"),
    [(ISHE, 9, 1 / 3 / 32**0.5), (HE, 64, 1 / 8), (ME, 4096, 1 / 64)],
)
def test_kernels_start_at_one_over_the_root_of_the_length(preset, length, std):
    x = jnp.zeros((1, 1, 32))
    kernel = jax.jit(preset(max_length=length).init)(jax.random.key(1), x)["params"]["kernel"]
    sampling_error = (2 * kernel.size) ** -0.5
    assert np.std(np.asarray(kernel)) == pytest.approx(std, rel=4 * sampling_error)
    assert abs(np.mean(np.asarray(kernel))) < 4 * std * kernel.size**-0.5


def test_kernel_scale_sets_the_start():
    def start(scale):
        mixer = ME(max_length=64, kernel_scale=scale)
        return jax.jit(mixer.init)(jax.random.key(1), jnp.zeros((1, 1, 2)))["params"]["kernel"]

    np.testing.assert_allclose(start(3.0), np.asarray(start(None)) * 3 * 8, rtol=1e-5)


def test_other_projections_start_with_variance_one_over_the_width():
    params = jax.jit(HE(max_length=4).init)(jax.random.key(2), jnp.zeros((1, 1, 64)))["params"]
    for name in ("value", "adjust", "output"):
        assert np.std(np.asarray(params[name]["kernel"])) == pytest.approx(1 / 8, rel=0.05), name


@pytest.mark.parametrize(("preset", "exponent"), [(SHE, 1.0), (ISHE, 0.0)], ids=["she", "ishe"])
def test_variance_of_the_extraction_at_unit_kernel_scale(preset, exponent):
    """Var e_i is i for SHE and 1 at every i for iSHE: the reason for iSHE."""
    time = features = 48
    x = np.random.default_rng(0).normal(size=(96, time, features))
    x = jnp.asarray(x, jnp.float32)
    mixer = preset(max_length=time, kernel_scale=1.0, adjust_bias=True)
    params = jax.jit(mixer.init)(jax.random.key(1), x)["params"]
    params["adjust"] = {"kernel": jnp.zeros((features, features)), "bias": jnp.ones(features)}
    variance = np.var(np.asarray(jax.jit(mixer.apply)({"params": params}, x)), axis=(0, 2))
    i = np.arange(1, time + 1)
    slope = np.polyfit(np.log(i), np.log(variance), 1)[0]
    assert slope == pytest.approx(exponent, abs=0.08)
    np.testing.assert_allclose(variance / i**exponent, 1, atol=0.2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_length": 0}, "max_length=0: choose at least 1"),
        ({"kernel": "row"}, "unknown kernel 'row': choose one of channel, head, matrix, scalar"),
        ({"scale": "sqrt"}, "scale='sqrt' is unknown: choose None or 'rsqrt'"),
        ({"adjust_activation": "swish"}, "unknown activation 'swish': choose one of gelu, identi"),
        ({"method": "magic"}, "unknown method 'magic': choose one of auto, conv, fft, scan"),
        (
            {"kernel": "head", "num_heads": 4},
            "features=6 is not divisible by num_heads=4: choose 4 or 8",
        ),
        ({"kernel": "head", "num_heads": 0}, "num_heads=0: choose at least 1"),
    ],
)
def test_fields_that_do_not_fit(fields, message):
    mixer = Extractor(**{"max_length": 3, **fields})
    with pytest.raises(UsageError, match=message.replace("'", ".")):
        mixer.init(jax.random.key(0), jnp.zeros((1, 3, 6)))
