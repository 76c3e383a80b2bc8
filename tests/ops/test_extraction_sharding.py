"""The extraction sum over eight simulated devices: right values, and no needless traffic."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_extractor.ops import causal_extract, spectral_plan

pytestmark = pytest.mark.core

LAYOUTS = {
    "batch": (P("data"), P()),
    "batch and outputs": (P("data"), P(None, None, "model")),
    "time": (P(None, "data"), P()),
}


def mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def draw():
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((8, 48, 8)), rng.standard_normal((48, 8, 6)) / 20
    return jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)


def loss(x, w, method):
    return jnp.sum(causal_extract(x, w, method=method) ** 2)


@functools.cache
def reference():
    return jax.jit(jax.value_and_grad(functools.partial(loss, method="scan"), (0, 1)))(*draw())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", ["spectral", "conv", "toeplitz", "scan", "fft"])
def test_values_and_gradients_under_a_mesh(method, layout):
    x, w = (
        jax.device_put(a, NamedSharding(mesh(), spec))
        for a, spec in zip(draw(), LAYOUTS[layout], strict=True)
    )
    run = jax.jit(jax.value_and_grad(functools.partial(loss, method=method), (0, 1)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), run(x, w), reference()
    )


@pytest.mark.parametrize("layout", ["batch", "batch and outputs"])
@pytest.mark.parametrize("method", ["spectral", "conv", "toeplitz", "scan"])
def test_nothing_is_gathered(method, layout, monkeypatch):
    """Forward needs no traffic; backward only sums: dw over the batch, dx over the outputs."""
    monkeypatch.setattr(spectral_plan, "CHUNK_BYTES", 1 << 14)  # several chunks, as at real sizes
    x, w = (
        jax.device_put(a, NamedSharding(mesh(), spec))
        for a, spec in zip(draw(), LAYOUTS[layout], strict=True)
    )
    forward = jax.jit(functools.partial(causal_extract, method=method)).lower(x, w).compile()
    backward = jax.jit(jax.grad(functools.partial(loss, method=method), (0, 1)))
    backward = backward.lower(x, w).compile()
    assert collectives(forward) == set()
    assert collectives(backward) == {"all-reduce"}
    batch, outputs = LAYOUTS[layout][0][0], LAYOUTS[layout][1][2:] or (None,)
    assert forward(x, w).sharding.is_equivalent_to(
        NamedSharding(mesh(), P(batch, None, *outputs)), 3
    )


def collectives(compiled) -> set[str]:
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return set(re.findall(rf"\b({kinds})(?:-start)?\(", compiled.as_text()))


@pytest.mark.parametrize("method", ["spectral", "fft"])
def test_inside_shard_map(method):
    """Each device computes its own sequences; w's cotangent is summed over them."""
    x, w = draw()
    spread = jax.shard_map(
        functools.partial(causal_extract, method=method),
        mesh=mesh(),
        in_specs=(P("data"), P()),
        out_specs=P("data"),
    )
    run = jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(spread(x, w) ** 2), (0, 1)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), run(x, w), reference()
    )
    compiled = jax.jit(spread).lower(x, w).compile()
    assert "all-gather" not in collectives(compiled)
