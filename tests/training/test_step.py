"""The step: loss and gradients against a plain reference, accumulation, weights, donation."""

import dataclasses
import functools
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_extractor.data import Batch
from jax_extractor.models import ExtractorConfig, LanguageModel, ModelConfig
from jax_extractor.ops import WeightSpectrum
from jax_extractor.training import OptimizerConfig, initial_state, make_optimizer, train_step
from jax_extractor.training.sharding import batch_sharding, make_mesh, place, state_shardings
from jax_extractor.training.step import jit_step, summed_loss, weight_spectra

MODEL = ModelConfig(mixer="ishe", features=8, num_layers=1, max_length=6, ffn_features=16)
V = 11


def random_batch(seed, rows=8, length=6, real=0.7):
    rng = np.random.default_rng(seed)
    inputs, targets = rng.integers(0, V, (2, rows, length)).astype(np.int32)
    weights = (rng.random((rows, length)) < real).astype(np.float32)
    weights[:, 0] = 1
    return Batch(inputs, targets, weights)


def keep_gradients():
    """An optimizer that leaves the parameters alone and keeps the gradients as its state."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, _, params: (jax.tree.map(jnp.zeros_like, params), grads),
    )


@functools.cache
def compiled_step(accumulate, config):
    """(initial state, step) with an optimizer that keeps the gradients."""
    model, optimizer = LanguageModel(config, V), keep_gradients()
    run = partial(
        train_step,
        model=model,
        optimizer=optimizer,
        schedule=optax.constant_schedule(0.5),
        accumulate=accumulate,
    )
    return jax.jit(partial(initial_state, model, optimizer, 3))(), jax.jit(run)


def one_step(batch, accumulate=1, config=MODEL, step=0):
    """(loss, gradients) of a step from the initial parameters."""
    state, run = compiled_step(accumulate, config)
    after, metrics = run(state._replace(step=jnp.int32(step)), batch)
    assert int(after.step) == step + 1
    assert float(metrics["learning_rate"]) == 0.5
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(after.opt_state)))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-6)
    return float(metrics["loss"]), after.opt_state


assert_trees_close = partial(chex.assert_trees_all_close, rtol=2e-5, atol=1e-6)


def test_loss_and_gradients_against_a_plain_reference():
    batch = random_batch(0)
    model = LanguageModel(MODEL, V)
    params = compiled_step(1, MODEL)[0].params

    def reference(params):
        log_p = jax.nn.log_softmax(model.apply({"params": params}, jnp.asarray(batch.inputs)))
        real = [  # one token after the other, as the definition says
            -log_p[b, t, batch.targets[b, t]]
            for b in range(8)
            for t in range(6)
            if batch.weights[b, t]
        ]
        return jnp.stack(real).mean()

    loss, grads = one_step(batch)
    want, want_grads = jax.jit(jax.value_and_grad(reference))(params)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    assert_trees_close(grads, want_grads)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))


def test_the_loss_in_numpy():
    batch = random_batch(1)
    model = LanguageModel(MODEL, V)
    params = compiled_step(1, MODEL)[0].params
    logits = np.float64(model.apply({"params": params}, jnp.asarray(batch.inputs)))
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    nats = -np.log(np.take_along_axis(p, batch.targets[..., None], -1)[..., 0])
    total, count = jax.jit(partial(summed_loss, model))(params, batch)
    assert float(count) == batch.weights.sum()
    np.testing.assert_allclose(total, (nats * batch.weights).sum(), rtol=1e-6)


@pytest.mark.parametrize(
    ("accumulate", "fields"),
    [
        (2, {"mixer": "mha"}),
        (4, {"extractor": ExtractorConfig(method="conv")}),
        (4, {"extractor": ExtractorConfig(method="spectral")}),
        (2, {"extractor": ExtractorConfig(method="spectral"), "scan_layers": True, "remat": True}),
    ],
    ids=["mha", "conv", "spectral", "spectral-scanned"],
)
def test_accumulation_changes_nothing(accumulate, fields):
    """Rows have unequal numbers of real tokens, so a mean of means would differ."""
    config = dataclasses.replace(MODEL, **fields)
    batch = random_batch(2)
    batch.weights[1::2, 1:] = 0
    loss, grads = one_step(batch, config=config)
    other_loss, other_grads = one_step(batch, accumulate, config)
    np.testing.assert_allclose(other_loss, loss, rtol=1e-6)
    assert_trees_close(other_grads, grads)


def test_micro_batches_share_the_transforms_of_the_weights():
    """Those of all Extractors that compute by transforms, and of nothing else."""
    tokens = random_batch(0).inputs
    for method, found in (("spectral", 2), ("conv", 0)):
        config = dataclasses.replace(MODEL, num_layers=2, extractor=ExtractorConfig(method=method))
        model = LanguageModel(config, V)
        params = jax.jit(model.init)(jax.random.key(0), tokens)["params"]
        spectra = jax.eval_shape(functools.partial(weight_spectra, model), params, tokens)
        whole = jax.tree.leaves(spectra, is_leaf=lambda node: isinstance(node, WeightSpectrum))
        assert [type(spectrum) for spectrum in whole] == [WeightSpectrum] * found


def test_only_real_tokens_count():
    """Half a batch and rows of padding give what the half alone, given twice, gives."""
    half, padding = (Batch(*(part[:4] for part in random_batch(seed))) for seed in (3, 4))
    padding = padding._replace(weights=np.zeros((4, 6), np.float32))
    twice, padded = (
        Batch(*map(np.concatenate, zip(half, other, strict=True))) for other in (half, padding)
    )
    loss, grads = one_step(twice)
    for accumulate in (1, 2):
        other_loss, other_grads = one_step(padded, accumulate)
        np.testing.assert_allclose(other_loss, loss, rtol=1e-6)
        assert_trees_close(other_grads, grads)


def test_dropout_is_a_function_of_seed_and_step():
    config = ModelConfig(**(vars(MODEL) | {"dropout": 0.5}))
    batch = random_batch(5)
    first, again, later = (one_step(batch, config=config, step=s)[0] for s in (0, 0, 1))
    assert first == again
    assert abs(first - later) > 1e-3
    # With one key for both, two micro-batches of the same rows would have the loss of one.
    half = Batch(*(part[:4] for part in batch))
    twice = Batch(*(np.repeat(part, 2, axis=0) for part in half))
    assert abs(one_step(twice, 2, config)[0] - one_step(half, 1, config)[0]) > 1e-3


def test_the_initial_state_is_a_function_of_the_seed():
    model, (optimizer, _) = LanguageModel(MODEL, V), make_optimizer(OptimizerConfig(), 10)
    create = jax.jit(partial(initial_state, model, optimizer), static_argnums=0)
    a, b = create(1), create(2)
    for seed, state in ((1, a), (2, b)):
        dropout_key = jax.random.split(jax.random.key(seed))[1]
        assert np.array_equal(state.rng, jax.random.key_data(dropout_key))
        assert int(state.step) == 0
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.opt_state))
    differing = jax.tree.map(lambda x, y: bool(np.any(x != y)), a.params, b.params)
    assert differing["embed"]["embedding"] and differing["softmax"]["kernel"]
    assert not differing["final_norm"]["scale"]


@pytest.fixture(scope="module")
def compiled():
    """(state, step, batches) on a 4×2 mesh, traced at most once."""
    model, (optimizer, schedule) = LanguageModel(MODEL, V), make_optimizer(OptimizerConfig(), 10)
    mesh = make_mesh(2)
    state = jax.jit(partial(initial_state, model, optimizer, 0))()

    @chex.assert_max_traces(n=1)
    def run(state, batch):
        return train_step(state, batch, model=model, optimizer=optimizer, schedule=schedule)

    step = jit_step(run, mesh, state)
    state = jax.device_put(state, state_shardings(mesh, state))
    return state, step, [place(random_batch(s), batch_sharding(mesh)) for s in range(6)]


def test_one_trace_donated_buffers_and_no_transfer(compiled):
    state, step, batches = compiled
    state, _ = step(state, batches[0])
    with jax.transfer_guard("disallow"):  # nothing goes to or comes from the host unasked
        for batch in batches[1:]:
            before = jax.tree.leaves((state.params, state.opt_state, state.rng))
            state, metrics = step(state, batch)
            assert all(leaf.is_deleted() for leaf in before)
    assert int(state.step) == 6
    assert np.isfinite(float(metrics["loss"]))
