"""One training step as a pure function, and the two ways to run it: jit over a mesh, or pmap.

    loss = Σ w_bt · (−log p(target_bt)) / Σ w_bt      over every row of the step's batch

whatever the number of micro-batches or devices: sums are added up first and divided once.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jax_extractor.data import Batch
from jax_extractor.models import LanguageModel
from jax_extractor.shapes import Array, PyTree
from jax_extractor.training.sharding import batch_sharding, replicated, state_shardings


class TrainState(NamedTuple):
    """What a checkpoint holds. rng is raw key data, so that it is an array like the others."""

    step: Array
    params: PyTree
    opt_state: PyTree
    rng: Array


def initial_state(
    model: LanguageModel, optimizer: optax.GradientTransformation, seed: int
) -> TrainState:
    """The state before the first step; a pure function of the seed."""
    init_key, dropout_key = jax.random.split(jax.random.key(seed))
    tokens = jnp.zeros((1, model.config.max_length), jnp.int32)
    params = model.init(init_key, tokens)["params"]
    return TrainState(
        jnp.zeros((), jnp.int32), params, optimizer.init(params), jax.random.key_data(dropout_key)
    )


def summed_loss(
    model: LanguageModel,
    params: PyTree,
    batch: Batch,
    dropout_key: Array | None = None,
    spectra: PyTree | None = None,
) -> tuple[Array, Array]:
    """(Σ w · nats, Σ w) over a batch; with a key, dropout is on.

    spectra is what `weight_spectra` gave for these parameters; without it they are transformed here.
    """
    logits = model.apply(
        {"params": params} | ({"spectra": spectra} if spectra else {}),
        batch.inputs,
        deterministic=dropout_key is None,
        rngs=None if dropout_key is None else {"dropout": dropout_key},
    )
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    return jnp.sum(nats * batch.weights), jnp.sum(batch.weights)


def weight_spectra(model: LanguageModel, params: PyTree, tokens: Array) -> PyTree:
    """The transforms of all Extractors' weights for tokens (B, T) of that shape; linear in them."""
    _, variables = model.apply({"params": params}, tokens, mutable=["spectra"])
    return variables.get("spectra", {})


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    accumulate: int = 1,
    axis_name: str | None = None,
) -> tuple[TrainState, dict[str, Array]]:
    """The next state and the step's metrics, all on device: loss (nats per token), grad_norm, rate.

    The batch's rows are cut into `accumulate` micro-batches whose gradients are summed; they share
    one transform of the Extractors' weights, forward and backward. Under pmap `axis_name` names the
    axis over which the devices' sums are added.
    """
    key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
    if axis_name is not None:
        key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))
    dropout = any(model.config.dropout_rates().values())

    def gradient(index: Array | int, micro: Batch, spectra: PyTree) -> tuple[Array, Array, PyTree]:
        """(Σ w · nats, Σ w, gradients in parameters and spectra) of a micro-batch."""
        micro_key = jax.random.fold_in(key, index) if dropout else None

        def value(params: PyTree, spectra: PyTree) -> tuple[Array, Array]:
            return summed_loss(model, params, micro, micro_key, spectra)

        both = jax.value_and_grad(value, (0, 1), has_aux=True)
        (nats, count), grads = both(state.params, spectra)
        return nats, count, grads

    if accumulate == 1:
        nats, count, (grads, _) = gradient(0, batch, {})
    else:
        # Row r goes to micro-batch r mod A: each device keeps the rows it has.
        micros = jax.tree.map(
            lambda rows: rows.reshape(-1, accumulate, *rows.shape[1:]).swapaxes(0, 1), batch
        )
        tokens = micros.inputs[0]
        spectra, transposed = jax.vjp(partial(weight_spectra, model, tokens=tokens), state.params)
        zeros = jax.tree.map(jnp.zeros_like, (jnp.zeros(()),) * 2 + ((state.params, spectra),))
        (nats, count, (grads, of_spectra)), _ = jax.lax.scan(
            lambda sums, item: (jax.tree.map(jnp.add, sums, gradient(*item, spectra)), None),
            zeros,
            (jnp.arange(accumulate), micros),
        )
        grads = jax.tree.map(jnp.add, grads, *transposed(of_spectra))
    if axis_name is not None:
        nats, count, grads = jax.lax.psum((nats, count, grads), axis_name)
    grads = jax.tree.map(lambda g: g / count.astype(g.dtype), grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {
        "loss": nats / count,
        "grad_norm": optax.tree.norm(grads),
        "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
    }
    return TrainState(state.step + 1, params, opt_state, state.rng), metrics


StepFunction = Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]


def jit_step(step: StepFunction, mesh: Mesh, state: PyTree) -> StepFunction:
    """The step compiled with explicit shardings over the mesh; the old state's buffers are reused."""
    shardings = state_shardings(mesh, state)
    return jax.jit(
        step,
        in_shardings=(shardings, batch_sharding(mesh)),
        out_shardings=(shardings, replicated(mesh)),
        donate_argnums=0,
    )


def pmap_step(step: Callable) -> StepFunction:
    """The same step under pmap: one replica of the state a device, batches (devices, rows, T)."""
    return jax.pmap(partial(step, axis_name="data"), axis_name="data", donate_argnums=0)
