"""Meshes and pmap: eight devices give what one device gives, and parameters are really split."""

from functools import partial

import chex
import jax
import numpy as np
import pytest

from jax_extractor.data import Batch
from jax_extractor.errors import UsageError
from jax_extractor.models import LanguageModel, ModelConfig
from jax_extractor.training import (
    OptimizerConfig,
    TrainConfig,
    initial_state,
    make_optimizer,
    train_step,
)
from jax_extractor.training.placement import make_placement

MODEL = ModelConfig(mixer="ishe", features=16, num_layers=1, max_length=6, ffn_features=32)
V = 16


def batches(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        inputs, targets = rng.integers(0, V, (2, 16, 6)).astype(np.int32)
        weights = (rng.random((16, 6)) < 0.6).astype(np.float32)
        yield Batch(inputs, targets, weights)


def placement(**train):
    model = LanguageModel(MODEL, V)
    optimizer, schedule = make_optimizer(OptimizerConfig(learning_rate=0.01), 100)
    config = TrainConfig(batch_size=16, **train)
    step = partial(
        train_step,
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        accumulate=config.accumulate,
    )
    return make_placement(config, partial(initial_state, model, optimizer, 5), step)


def losses(placed, steps=5):
    """The loss of each step, and the state after them as the step gives it."""
    state = placed.spread(placed.create())
    found = []
    for batch in batches(steps):
        state, metrics = placed.step(state, placed.place_batch(batch))
        found.append(np.asarray(metrics["loss"]).ravel())
    return np.array(found), state


@pytest.fixture(scope="module")
def one_device():
    device = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: device)
        placed = placement()
        found, state = losses(placed)
    assert jax.tree.leaves(state)[0].devices() == set(device)
    return found[:, 0], jax.device_get(state.params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "train",
    [
        {"model_devices": 1},
        {"model_devices": 2},
        {"model_devices": 8, "accumulate": 2},
        {"parallel": "pmap"},
        {"parallel": "pmap", "accumulate": 2},
    ],
    ids=["8x1", "4x2", "1x8", "pmap", "pmap-accumulate"],
)
def test_eight_devices_give_the_losses_of_one(train, one_device):
    placed = placement(**train)
    found, state = losses(placed)
    expected, params = one_device
    assert found.shape == (5, 8 if train.get("parallel") == "pmap" else 1)
    np.testing.assert_allclose(found, np.broadcast_to(expected[:, None], found.shape), rtol=2e-6)
    chex.assert_trees_all_close(
        jax.device_get(placed.gather(state).params), params, rtol=1e-3, atol=2e-5
    )


def test_parameters_and_moments_are_split_over_the_model_axis():
    placed = placement(model_devices=4)
    created = placed.create()
    state, _ = placed.step(created, placed.place_batch(next(batches(1))))
    split = 0
    for like, leaf in zip(jax.tree.leaves(placed.like), jax.tree.leaves(state), strict=True):
        assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)
        shapes = {shard.data.shape for shard in leaf.addressable_shards}
        if leaf.ndim >= 2:
            assert shapes == {(*leaf.shape[:-1], leaf.shape[-1] // 4)}
            split += 1
        else:
            assert shapes == {leaf.shape}
    # Embedding, W and adjustment, the FFN's two, the regression: each with two moments.
    assert split == 3 * 6


def test_the_state_does_not_depend_on_the_mesh():
    states = [
        jax.device_get(placement(**train).create())
        for train in ({"model_devices": 1}, {"model_devices": 8}, {"parallel": "pmap"})
    ]
    chex.assert_trees_all_equal(*states)


def test_pmap_spreads_and_gathers():
    placed = placement(parallel="pmap")
    state = placed.create()
    spread = placed.spread(state)
    assert spread.params["softmax"]["kernel"].shape == (8, 16, V)
    chex.assert_trees_all_equal(placed.gather(jax.pmap(lambda x: x)(spread)), state)
    batch = next(batches(1))
    assert np.array_equal(placed.place_batch(batch).inputs.reshape(16, 6), batch.inputs)


@pytest.mark.parametrize(
    "train, told",
    [
        ({"model_devices": 3}, "train.model_devices=3 does not divide the 8 devices"),
        ({"model_devices": 16}, "train.model_devices=16 does not divide the 8 devices"),
        ({"accumulate": 4}, "train.batch_size=16 does not divide .* choose a multiple of 32"),
        ({"accumulate": 4, "parallel": "pmap"}, "choose a multiple of 32"),
    ],
)
def test_sizes_that_do_not_divide(train, told):
    with pytest.raises(UsageError, match=told):
        placement(**train)
