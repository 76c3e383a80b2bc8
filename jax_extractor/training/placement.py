"""The two ways to run one step on many devices behind one small interface."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from jax_extractor.data import Batch
from jax_extractor.errors import UsageError
from jax_extractor.shapes import Array, PyTree
from jax_extractor.training.config import TrainConfig
from jax_extractor.training.sharding import batch_sharding, make_mesh, place, state_shardings
from jax_extractor.training.step import StepFunction, TrainState, jit_step, pmap_step


class Placement(NamedTuple):
    """How a state and its batches lie on the devices, and the step compiled for that.

    like is the abstract state with shardings that a checkpoint is restored to; spread lays such a
    state out for the step, gather gives it back (for checkpoints and evaluation).
    """

    like: PyTree
    create: Callable[[], TrainState]
    spread: Callable[[TrainState], TrainState]
    gather: Callable[[TrainState], TrainState]
    place_batch: Callable[[Batch], Batch]
    step: StepFunction


def make_placement(
    config: TrainConfig, create: Callable[[], TrainState], step: Callable
) -> Placement:
    """The placement that the configuration asks for; UsageError where sizes do not divide.

    create makes the initial state, step is `train_step` with all but state and batch bound.
    """
    devices = len(jax.devices())
    shares = devices // config.model_devices * config.accumulate
    if devices % config.model_devices == 0 and config.batch_size % shares:
        raise UsageError(
            f"train.batch_size={config.batch_size} does not divide over {devices} devices "
            f"(train.model_devices={config.model_devices}, train.accumulate={config.accumulate}): "
            f"choose a multiple of {shares}"
        )
    mesh = make_mesh(1 if config.parallel == "pmap" else config.model_devices)
    abstract = jax.eval_shape(create)
    shardings = state_shardings(mesh, abstract)
    like = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract,
        shardings,
    )
    create = jax.jit(create, out_shardings=shardings)
    if config.parallel == "pmap":
        return Placement(
            like=like,
            create=create,
            # By way of the host, since pmap takes no array that lies on another mesh than its own.
            spread=partial(jax.tree.map, lambda x: np.broadcast_to(x, (devices, *x.shape))),
            gather=partial(jax.tree.map, _first_replica),
            place_batch=partial(
                jax.tree.map, lambda rows: rows.reshape(devices, -1, *rows.shape[1:])
            ),
            step=pmap_step(step),
        )
    return Placement(
        like=like,
        create=create,
        spread=lambda state: state,
        gather=lambda state: state,
        place_batch=lambda batch: place(batch, batch_sharding(mesh)),
        step=jit_step(step, mesh, abstract),
    )


def _first_replica(x: Array) -> Array:
    return jax.device_put(np.asarray(x.addressable_shards[0].data)[0])
