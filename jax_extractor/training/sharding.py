"""How arrays lie on devices: a mesh with a data and a model axis, and one rule for each kind of array.

Batches are split along "data". A parameter with two axes or more is split along its last, its
output features, over "model" where that divides evenly, and is replicated otherwise; the optimizer's
moments lie as their parameters do. A mesh of one device is the ordinary case.
"""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_extractor.errors import UsageError
from jax_extractor.shapes import PyTree


def make_mesh(model_devices: int = 1, devices: list | None = None) -> Mesh:
    """A (data, model) mesh of all devices; UsageError where model_devices does not divide them."""
    devices = jax.devices() if devices is None else devices
    if len(devices) % model_devices:
        raise UsageError(
            f"train.model_devices={model_devices} does not divide the {len(devices)} devices here: "
            "choose a divisor"
        )
    return jax.make_mesh(
        (len(devices) // model_devices, model_devices),
        ("data", "model"),
        axis_types=(AxisType.Auto, AxisType.Auto),
        devices=devices,
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The first axis is split over "data"."""
    return NamedSharding(mesh, PartitionSpec("data"))


def state_shardings(mesh: Mesh, state: PyTree) -> PyTree:
    """A sharding for every array of a training state, by the rule at the head of this file."""

    def rule(leaf) -> NamedSharding:
        size = mesh.shape["model"]
        if size > 1 and len(leaf.shape) >= 2 and leaf.shape[-1] % size == 0:
            return NamedSharding(mesh, PartitionSpec(*[None] * (len(leaf.shape) - 1), "model"))
        return replicated(mesh)

    return jax.tree.map(rule, state)


def place(batch: PyTree, sharding: NamedSharding) -> PyTree:
    """This process's rows of a batch as global arrays; no host holds another's rows."""
    return jax.tree.map(
        lambda rows: jax.make_array_from_process_local_data(sharding, np.asarray(rows)), batch
    )
