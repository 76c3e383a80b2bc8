"""The Transformer core against its sublayers put together by hand."""

import dataclasses

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_extractor import mixers
from jax_extractor.models import (
    Core,
    ExtractorConfig,
    FeedForward,
    Layer,
    ModelConfig,
    mixer_from_config,
    stack_layers,
)

pytestmark = pytest.mark.core

B, T, D, F, M = 2, 5, 8, 24, 2
SIZES = {"features": D, "num_layers": M, "num_heads": 2, "max_length": 4, "ffn_features": F}
ARRANGEMENTS = ("mixer-ffn", "ffn-mixer", "mixer", "ffn", "parallel")


def config_of(**fields):
    return ModelConfig(**(SIZES | fields))


def rows(seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(B, T, D)), jnp.float32)


VALID = jnp.asarray(np.arange(T) >= np.array([[2], [0]]))


def random_variables(module, *args):
    """Random parameters, those included that start at 0 or 1."""
    shapes = jax.eval_shape(lambda key: module.init(key, *args), jax.random.key(0))
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape) / 2, p.dtype), shapes)


def close(got, expected, tolerance=1e-5):
    got, expected = (np.asarray(a, np.float64) for a in (got, expected))
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def assert_trees_close(got, expected, tolerance=1e-5):
    """Relative to the largest value of each leaf."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        close(a, b, tolerance)


def layer_by_hand(config, params, x, valid):
    """The equations at the head of models/core.py, with a layer norm and an FFN in NumPy."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def norm(x, name):
        if not config.pre_norm:
            return x
        y = x - x.mean(-1, keepdims=True)
        y = y / np.sqrt(y.var(-1, keepdims=True) + 1e-6)
        return y * p[name]["scale"] + p[name]["bias"]

    def mix(x):
        apply = jax.jit(mixer_from_config(config).apply)
        return np.asarray(apply({"params": params["mixer"]}, jnp.asarray(x, jnp.float32), valid))

    def ffn(x):
        hidden = np.maximum(x @ p["ffn"]["expand"]["kernel"] + p["ffn"]["expand"]["bias"], 0)
        return hidden @ p["ffn"]["contract"]["kernel"] + p["ffn"]["contract"]["bias"]

    x = np.asarray(x, np.float64)
    if config.arrangement == "parallel":
        y = norm(x, "mixer_norm")
        return x + mix(y) + ffn(y)
    for sublayer in config.arrangement.split("-"):
        y = norm(x, f"{sublayer}_norm")
        x = x + (mix(y) if sublayer == "mixer" else ffn(y))
    return x


@pytest.mark.parametrize("pre_norm", [True, False])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_arrangements_are_their_equations(arrangement, pre_norm):
    config = config_of(arrangement=arrangement, pre_norm=pre_norm, num_layers=2)
    core = Core(config)
    variables = random_variables(core, rows(), VALID)
    names = {"mixer": {"mixer"}, "ffn": {"ffn"}}.get(arrangement, {"mixer", "ffn"})
    norms = {"mixer_norm"} if arrangement == "parallel" else {f"{name}_norm" for name in names}
    expected_names = names | norms if pre_norm else names
    assert set(variables["params"]["layers_0"]) == expected_names

    def run(variables, x, valid):
        return core.apply(variables, x, valid, return_rows=True)

    y, all_rows = jax.jit(run)(variables, rows(), VALID)
    assert all_rows.shape == (3, B, T, D)
    np.testing.assert_array_equal(all_rows[0], rows())
    np.testing.assert_array_equal(all_rows[-1], y)
    for m in range(2):
        params = variables["params"][f"layers_{m}"]
        close(all_rows[m + 1], layer_by_hand(config, params, all_rows[m], VALID))


def test_fields_reach_the_sublayers():
    config = config_of(
        mixer="we",
        extractor=ExtractorConfig(
            kernel_scale=2.0, adjust_bias=True, adjust_activation="tanh", method="scan"
        ),
        ffn_activation="gelu",
        dtype="bfloat16",
    )
    mixer = mixer_from_config(config)
    for name, value in {
        "num_heads": 2,
        "max_length": 4,
        "kernel_scale": 2.0,
        "adjust_bias": True,
        "adjust_activation": "tanh",
        "method": "scan",
        "dtype": jnp.bfloat16,
    }.items():
        assert getattr(mixer, name) == value, name
    rotary = {
        positions: mixer_from_config(config_of(mixer="mha", positions=positions)).rotary
        for positions in ("auto", "learned", "sinusoidal", "rotary", "none")
    }
    assert [name for name, turned in rotary.items() if turned] == ["rotary"]
    ffn = FeedForward(config_of(ffn_activation="tanh"))
    variables = random_variables(ffn, rows())
    p = variables["params"]
    hidden = np.tanh(np.asarray(rows() @ p["expand"]["kernel"] + p["expand"]["bias"]))
    expected = hidden @ np.asarray(p["contract"]["kernel"]) + np.asarray(p["contract"]["bias"])
    close(ffn.apply(variables, rows()), expected)


@pytest.mark.parametrize("arrangement", ["ffn", "parallel"])
def test_dropout_drops_entries_of_the_sublayers_output(arrangement):
    """Without a norm, y - x is the branch: each entry is 0, or the branch over 1 - rate."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 32, D)), jnp.float32)
    config = config_of(arrangement=arrangement, pre_norm=False, dropout=0.25)
    layer = Layer(config)
    variables = random_variables(layer, x, None, True)

    @jax.jit
    def noisy(key):
        return layer.apply(variables, x, None, False, rngs={"dropout": key})

    exact = np.asarray(jax.jit(lambda: layer.apply(variables, x, None, True))())
    no_dropout = Layer(dataclasses.replace(config, dropout=0.0))
    np.testing.assert_array_equal(
        exact, jax.jit(lambda: no_dropout.apply(variables, x, None, False))()
    )
    y = np.asarray(noisy(jax.random.key(1)))
    dropped = y == np.asarray(x)
    assert abs(dropped.mean() - 0.25) < 4 * (0.25 * 0.75 / dropped.size) ** 0.5
    branch = exact - np.asarray(x)
    np.testing.assert_allclose((y - x)[~dropped], branch[~dropped] / 0.75, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(y, noisy(jax.random.key(1)))
    assert ((np.asarray(noisy(jax.random.key(2))) == np.asarray(x)) != dropped).any()


def test_dropout_needs_its_key_only_where_it_drops():
    core = Core(config_of(dropout=0.5))
    variables = random_variables(core, rows())
    with pytest.raises(flax.errors.InvalidRngError, match="dropout"):
        jax.eval_shape(lambda x: core.apply(variables, x, None, False), rows())
    calm = jax.make_jaxpr(core.apply)(variables, rows())
    assert str(calm) == str(jax.make_jaxpr(Core(config_of()).apply)(variables, rows()))


@pytest.mark.parametrize("scan_layers", [False, True])
def test_every_layer_drops_entries_of_its_own(scan_layers):
    config = config_of(arrangement="ffn", pre_norm=False, dropout=0.5, scan_layers=scan_layers)
    core = Core(config)
    x = jnp.ones((4, 16, D))
    variables = random_variables(core, x)

    def run(key):
        return core.apply(variables, x, None, False, True, rngs={"dropout": key})[1]

    all_rows = np.asarray(jax.jit(run)(jax.random.key(0)))
    kept = [all_rows[m + 1] != all_rows[m] for m in range(M)]
    assert 0.3 < (kept[0] == kept[1]).mean() < 0.7


def loss_of(config, key=None):
    """(outputs, all rows, gradients) of a core as one function of (variables, x)."""
    core = Core(config)
    rngs = {} if key is None else {"dropout": key}

    def loss(variables, x):
        y, all_rows = core.apply(variables, x, VALID, key is None, True, rngs=rngs)
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(all_rows)), (y, all_rows)

    return loss


def run(config, variables, key=None):
    grad = jax.jit(jax.grad(loss_of(config, key), (0, 1), has_aux=True))
    (params, inputs), outputs = grad(variables, rows())
    return params["params"], inputs, outputs


@pytest.mark.parametrize(("mixer", "remat"), [("ishe", False), ("mha", True)])
def test_scanned_layers_equal_unrolled_ones(mixer, remat):
    config = config_of(mixer=mixer)
    variables = random_variables(Core(config), rows())
    params, inputs, outputs = run(config, variables)
    stacked = {"params": stack_layers(variables["params"])}
    scanned = dataclasses.replace(config, scan_layers=True, remat=remat)
    shapes = jax.eval_shape(Core(scanned).init, jax.random.key(0), rows())
    assert jax.tree.map(jnp.shape, stacked) == jax.tree.map(jnp.shape, shapes)
    scanned_params, scanned_inputs, scanned_outputs = run(scanned, stacked)
    assert_trees_close(scanned_outputs, outputs)
    close(scanned_inputs, inputs)
    assert_trees_close(scanned_params, stack_layers(params))


def test_scanned_layers_start_different_and_at_the_unrolled_scale():
    config = config_of(features=32, scan_layers=True)
    x = jax.ShapeDtypeStruct((1, 1, 32), jnp.float32)
    init = jax.jit(lambda key: Core(config).init(key, jnp.zeros(x.shape)))
    kernel = np.asarray(init(jax.random.key(0))["params"]["layers"]["mixer"]["kernel"])
    assert kernel.shape == (M, 4, 32, 32)
    for m in range(M):
        assert np.std(kernel[m]) == pytest.approx(1 / 2 / 32**0.5, rel=0.05)
        assert np.abs(kernel[m] - kernel[m - 1]).mean() > 0.5 * np.std(kernel)


def test_remat_changes_no_output_and_no_gradient():
    """With dropout, whose masks the backward pass has to draw again."""
    config, key = config_of(dropout=0.5), jax.random.key(5)
    variables = random_variables(Core(config), rows())
    assert_trees_close(
        run(dataclasses.replace(config, remat=True), variables, key), run(config, variables, key)
    )


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("mixer", ["she", "mha"])
def test_remat_stores_the_rows_between_layers_alone(mixer, scan_layers):
    """What the backward pass keeps, beside parameters: with remat no activation of a layer."""

    def stored(remat):
        """Shapes of the residuals that hold values for every position."""
        config = config_of(mixer=mixer, scan_layers=scan_layers, remat=remat)
        core = Core(config)
        variables = jax.eval_shape(core.init, jax.random.key(0), rows())

        def residuals(variables, x):
            return jax.vjp(lambda v, x: core.apply(v, x)[0], variables, x)[1]

        kept = jax.tree.leaves(jax.eval_shape(residuals, variables, rows()))
        stack = (M,) if scan_layers else ()
        count = 1 if scan_layers else M
        hidden = [leaf for leaf in kept if leaf.shape == (*stack, B, T, F)]
        between = [leaf for leaf in kept if leaf.shape == (*stack, B, T, D)]
        return len(hidden), len(between), count

    hidden, between, count = stored(remat=False)
    assert hidden >= count
    assert between > count
    hidden, between, count = stored(remat=True)
    assert hidden == 0
    assert between == count


def test_remat_computes_the_forward_pass_again():
    config = config_of(extractor=ExtractorConfig(method="toeplitz"))
    variables = random_variables(Core(config), rows())

    def products(config):
        grad = jax.grad(lambda v: loss_of(config)(v, rows())[0])
        return str(jax.make_jaxpr(grad)(variables)).count("dot_general[")

    # A layer has four products: iSHE's kernel, its adjustment, the FFN's two. The last one's
    # result is not needed again.
    extra = products(dataclasses.replace(config, remat=True)) - products(config)
    assert 3 * M <= extra <= 4 * M


def test_stacking_keeps_the_order_of_more_than_ten_layers():
    params = {f"layers_{i}": {"kernel": jnp.full(2, float(i))} for i in range(12)}
    stacked = stack_layers(params)["layers"]["kernel"]
    np.testing.assert_array_equal(stacked, np.repeat(np.arange(12.0)[:, None], 2, axis=1))


def test_rows_are_returned_on_request_alone():
    core = Core(config_of())
    (y, nothing), _ = jax.eval_shape(core.init_with_output, jax.random.key(0), rows())
    assert nothing is None
    assert y.shape == (B, T, D)


def test_a_mixer_of_ones_own_trains_by_name(monkeypatch):
    """A class with the two common fields and a line in MIXERS is all it takes."""

    class Previous(nn.Module):
        max_length: int
        num_heads: int

        @nn.compact
        def __call__(self, x, valid=None, deterministic=True, decode=False):
            return jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]

    monkeypatch.setitem(mixers.MIXERS, "previous", Previous)
    config = ModelConfig(
        mixer="previous", features=4, num_layers=1, max_length=4, ffn_features=4, arrangement="mixer",
        pre_norm=False,
    )  # fmt: skip
    config.check()
    x = jnp.arange(12.0).reshape(1, 3, 4)
    y, _ = Core(config).apply({}, x)
    np.testing.assert_array_equal(y[0, 1:], x[0, 1:] + x[0, :-1])
