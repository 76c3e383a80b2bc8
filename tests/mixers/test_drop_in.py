"""An Extractor in a plain Linen block, in place of nn.MultiHeadDotProductAttention."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_extractor.mixers import ISHE

pytestmark = pytest.mark.core


class AttentionBlock(nn.Module):
    """A user's pre-norm Transformer block, as written with Flax alone."""

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]), dtype=bool)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(y, mask=mask)
        y = nn.LayerNorm()(x)
        return x + nn.Dense(x.shape[-1])(nn.relu(nn.Dense(4 * x.shape[-1])(y)))


class ExtractorBlock(nn.Module):
    """The same block with iSHE: an import, one line without the mask, one with the mixer."""

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        x = x + ISHE(max_length=12)(y)
        y = nn.LayerNorm()(x)
        return x + nn.Dense(x.shape[-1])(nn.relu(nn.Dense(4 * x.shape[-1])(y)))


BLOCKS = (AttentionBlock, ExtractorBlock)


class Model(nn.Module):
    block: type[nn.Module]

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(8, 16)(tokens)
        x = self.block()(x)
        return nn.Dense(8)(x)


def train(block, steps=40):
    """Losses on repeating the token of three positions ago: only mixing can tell it."""
    pattern = np.random.default_rng(0).integers(0, 8, (16, 3))
    tokens = np.tile(pattern, (1, 5))[:, :13]
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    model = Model(block)
    params = jax.jit(model.init)(jax.random.key(1), inputs)
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params, state):
        def loss(params):
            losses = optax.softmax_cross_entropy_with_integer_labels(
                model.apply(params, inputs), targets
            )
            return losses[:, 3:].mean()  # the first period cannot be known

        value, grads = jax.value_and_grad(loss)(params)
        with jax.numpy_dtype_promotion("standard"):  # optax counts its steps in int32
            updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    for _ in range(steps):
        params, state, value = step(params, state)
        losses.append(float(value))
    return losses


def test_the_changed_block_trains():
    losses = train(ExtractorBlock)
    assert losses[0] > 1.9  # near log 8 = 2.08, or above
    assert losses[-1] < 0.3


def test_the_changed_block_fits_where_the_other_was():
    tokens = jnp.zeros((2, 12), jnp.int32)
    logits, variables = zip(
        *(
            jax.eval_shape(Model(block).init_with_output, jax.random.key(0), tokens)
            for block in BLOCKS
        ),
        strict=True,
    )
    assert logits[0] == logits[1]
    names = [set(v["params"][f"{b.__name__}_0"]) for v, b in zip(variables, BLOCKS, strict=True)]
    assert names[0] ^ names[1] == {"MultiHeadDotProductAttention_0", "ISHE_0"}
