"""The optimizer: its schedule at marked steps, AdamW against numpy, clipping, decay, multipliers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_extractor.errors import UsageError
from jax_extractor.training import OptimizerConfig, make_optimizer
from jax_extractor.training.optimizer import make_schedule, map_by_path

PARAMS = {
    "core": {"layers_0": {"mixer": {"kernel": jnp.array([[1.0, -2.0], [0.5, 3.0]])}}},
    "final_norm": {"scale": jnp.array([1.0, 2.0]), "bias": jnp.array([0.5, -0.5])},
    "embed": {"embedding": jnp.array([[0.1, 0.2], [0.3, 0.4]])},
}


def gradients(seed):
    leaves, tree = jax.tree.flatten(PARAMS)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(
        tree, [jnp.asarray(rng.normal(size=x.shape).astype(np.float32)) for x in leaves]
    )


def apply(optimizer, steps):
    """The parameters after as many steps, each with gradients of its own."""

    @jax.jit
    def update(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, optimizer.init(PARAMS)
    for seed in range(steps):
        params, state = update(params, state, gradients(seed))
    return params


def adamw(config, steps, rates, factor=lambda path: 1.0):
    """The same in numpy and float64, written from Loshchilov & Hutter 2019, algorithm 2."""
    by_path = {}
    map_by_path(lambda path: by_path.setdefault(path, path), PARAMS)
    flat = dict(zip(by_path, (np.float64(x) for x in jax.tree.leaves(PARAMS)), strict=True))
    m = {path: np.zeros_like(x) for path, x in flat.items()}
    v = {path: np.zeros_like(x) for path, x in flat.items()}
    for t in range(1, steps + 1):
        grads = dict(zip(flat, map(np.float64, jax.tree.leaves(gradients(t - 1))), strict=True))
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        shrink = min(1.0, config.clip_norm / norm) if config.clip_norm else 1.0
        for path, g in grads.items():
            g = g * shrink
            m[path] = config.b1 * m[path] + (1 - config.b1) * g
            v[path] = config.b2 * v[path] + (1 - config.b2) * g**2
            step = m[path] / (1 - config.b1**t)
            step = step / (np.sqrt(v[path] / (1 - config.b2**t)) + 1e-8)
            if not path.startswith("final_norm"):
                step = step + config.weight_decay * flat[path]
            flat[path] = flat[path] - rates[t - 1] * factor(path) * step
    return flat


def assert_equal(params, expected):
    for (path, want), got in zip(expected.items(), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-7, err_msg=path)


@pytest.mark.parametrize("clip_norm", [0.0, 0.7, 100.0])
def test_adamw_against_numpy(clip_norm):
    config = OptimizerConfig(
        learning_rate=0.1,
        schedule="constant",
        warmup_steps=0,
        weight_decay=0.3,
        clip_norm=clip_norm,
    )
    optimizer, _ = make_optimizer(config, steps=100)
    assert_equal(apply(optimizer, 3), adamw(config, 3, [0.1] * 3))


def test_warm_up_and_cosine_reach_the_steps():
    config = OptimizerConfig(learning_rate=0.1, warmup_steps=2, clip_norm=0.0, weight_decay=0.1)
    optimizer, _ = make_optimizer(config, steps=20)
    # 2 steps of warm-up, then 18 of cosine from 0.1 to 0.01.
    cosine = [0.1 * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * n / 18))) for n in (0, 1)]
    assert_equal(apply(optimizer, 4), adamw(config, 4, [0.05, 0.1, *cosine]))


def test_multipliers_scale_the_rate_of_the_first_match():
    config = OptimizerConfig(
        learning_rate=0.1,
        schedule="constant",
        warmup_steps=0,
        weight_decay=0.2,
        multipliers=(("mixer/kernel$", 0.5), ("core|embed", 0.0)),
    )

    def factor(path):
        return {"core": 0.5, "embed": 0.0, "final_norm": 1.0}[path.split("/")[0]]

    optimizer, _ = make_optimizer(config, steps=10)
    params = apply(optimizer, 2)
    assert_equal(params, adamw(config, 2, [0.1] * 2, factor))
    assert np.array_equal(params["embed"]["embedding"], PARAMS["embed"]["embedding"])


@pytest.mark.parametrize("multipliers", [(("attention", 2.0),), (("kernel", 1.0), ("mixer", 2.0))])
def test_a_pattern_without_a_match(multipliers):
    optimizer, _ = make_optimizer(OptimizerConfig(multipliers=multipliers), steps=10)
    with pytest.raises(UsageError) as caught:
        optimizer.init(PARAMS)
    message = str(caught.value)
    assert f"optimizer.multipliers: {multipliers[-1][0]!r}" in message
    assert "core/layers_0/mixer/kernel" in message and "final_norm/scale" in message


@pytest.mark.parametrize(
    "config, steps, expected",
    [
        # Linear from peak/4 to the peak, which the cosine starts from; half-way down it is the mean.
        (
            OptimizerConfig(learning_rate=0.8, warmup_steps=4, final_fraction=0.25),
            84,
            {0: 0.2, 1: 0.4, 2: 0.6, 3: 0.8, 4: 0.8, 44: 0.5, 84: 0.2},
        ),
        # A warm-up longer than a tenth of all steps is cut.
        (OptimizerConfig(learning_rate=1.0, warmup_steps=100), 20, {0: 0.5, 1: 1.0, 11: 0.55}),
        (
            OptimizerConfig(learning_rate=0.3, warmup_steps=3, schedule="constant"),
            60,
            {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.3, 59: 0.3, 10_000: 0.3},
        ),
        (
            OptimizerConfig(learning_rate=0.3, warmup_steps=0, final_fraction=1.0),
            9,
            {0: 0.3, 8: 0.3},
        ),
        (OptimizerConfig(learning_rate=0.3, warmup_steps=1), 50, {0: 0.3, 1: 0.3, 50: 0.03}),
        (OptimizerConfig(learning_rate=0.3, warmup_steps=5), 1, {0: 0.3}),
    ],
)
def test_schedule(config, steps, expected):
    schedule = make_schedule(config, steps)
    for step, rate in expected.items():
        np.testing.assert_allclose(schedule(jnp.int32(step)), rate, rtol=1e-6, err_msg=str(step))
