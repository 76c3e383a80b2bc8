"""Every mixer as an NNX module, through flax.nnx.bridge."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_extractor.mixers import HE, ISHE, ME, SHE, WE, MultiHeadAttention, TalkingHeadsAttention

pytestmark = pytest.mark.core

MIXERS = {
    "she": SHE(max_length=4),
    "ishe": ISHE(max_length=4),
    "he": HE(max_length=4),
    "we": WE(max_length=4, num_heads=2),
    "me": ME(max_length=4),
    "mha": MultiHeadAttention(num_heads=2),
    "talking_heads": TalkingHeadsAttention(key_heads=1, heads=2, value_heads=4),
}


@pytest.mark.parametrize("name", MIXERS)
def test_equals_linen_in_values_and_gradients(name):
    linen = MIXERS[name]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 4)), jnp.float32)
    valid = jnp.arange(6) >= jnp.asarray([[0], [2]])
    model = nnx.bridge.ToNNX(linen, rngs=nnx.Rngs(0)).lazy_init(x)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    expected_shapes = jax.eval_shape(linen.init, jax.random.key(0), x)["params"]
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda s: s.shape, expected_shapes)

    def linen_sum(params):
        y = linen.apply({"params": params}, x, valid)
        return jnp.sum(jnp.sin(y)), y

    def nnx_sum(model):
        y = model(x, valid)
        return jnp.sum(jnp.sin(y)), y

    expected, y = jax.jit(jax.grad(linen_sum, has_aux=True))(params)
    grads, nnx_y = nnx.jit(nnx.grad(nnx_sum, has_aux=True))(model)
    np.testing.assert_allclose(nnx_y, y, rtol=1e-6, atol=1e-6)
    assert np.abs(y).max() > 0.1
    got = nnx.to_pure_dict(grads)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-5)
