"""The mesh and the rule by which arrays lie on it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_extractor.errors import UsageError
from jax_extractor.training.sharding import (
    batch_sharding,
    make_mesh,
    place,
    replicated,
    state_shardings,
)


@pytest.mark.parametrize("model_devices", [1, 2, 4, 8])
def test_mesh_holds_every_device_once(model_devices):
    mesh = make_mesh(model_devices)
    assert dict(mesh.shape) == {"data": 8 // model_devices, "model": model_devices}
    assert set(mesh.devices.flat) == set(jax.devices())


def test_a_mesh_of_one_device():
    assert dict(make_mesh(devices=jax.devices()[:1]).shape) == {"data": 1, "model": 1}


def test_model_devices_must_divide():
    with pytest.raises(UsageError, match=r"train\.model_devices=3 does not divide the 8 devices"):
        make_mesh(3)


def test_the_last_axis_is_split_where_it_divides():
    state = {
        "kernel": jnp.zeros((3, 16)),
        "she": jnp.zeros((5, 16, 8)),
        "odd": jnp.zeros((16, 6)),
        "bias": jnp.zeros(16),
        "count": jnp.zeros((), jnp.int32),
    }
    found = state_shardings(make_mesh(4), state)
    assert {name: s.spec for name, s in found.items()} == {
        "kernel": P(None, "model"),
        "she": P(None, None, "model"),
        "odd": P(),
        "bias": P(),
        "count": P(),
    }
    ones = state_shardings(make_mesh(1), state)
    assert all(s.spec == P() for s in ones.values())


def test_batches_are_split_by_rows():
    mesh = make_mesh(2)
    rows = np.arange(24).reshape(8, 3)
    placed = place({"rows": rows}, batch_sharding(mesh))["rows"]
    assert np.array_equal(placed, rows)
    shards = {s.device: np.asarray(s.data) for s in placed.addressable_shards}
    for index, pair in enumerate(mesh.devices):  # two rows a pair of devices
        for device in pair:
            assert np.array_equal(shards[device], rows[2 * index : 2 * index + 2])
    assert place(rows, replicated(mesh)).sharding.is_fully_replicated
