"""The optimizer of a configuration, made of optax parts."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import optax

from jax_extractor.errors import UsageError
from jax_extractor.shapes import PyTree
from jax_extractor.training.config import OptimizerConfig


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by step: linear warm-up, then cosine decay or a constant."""
    warmup = min(config.warmup_steps, steps // 10)
    peak = config.learning_rate
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, max(steps - warmup, 1), config.final_fraction)
    else:
        after = optax.constant_schedule(peak)
    # The first step already moves: at step 0 of a warm-up of n the rate is peak/n, not 0.
    rise = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    return _promoting(optax.join_schedules([rise, after], [warmup]))


def make_optimizer(
    config: OptimizerConfig, steps: int
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """AdamW: clip → Adam → weight decay → −rate → multipliers. Returns it with its schedule."""
    schedule = make_schedule(config, steps)
    parts = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    parts.append(
        optax.adamw(
            schedule,
            b1=config.b1,
            b2=config.b2,
            weight_decay=config.weight_decay,
            mask=lambda params: map_by_path(_decays, params),
        )
    )
    if config.multipliers:
        parts.append(scale_by_path(config.multipliers))
    chain = optax.chain(*parts)
    return optax.GradientTransformation(chain.init, _promoting(chain.update)), schedule


def _promoting(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under standard dtype promotion: optax raises floats to int32 step counts."""

    @functools.wraps(function)
    def promoted(*args, **kwargs):
        with jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return promoted


def map_by_path(function: Callable[[str], object], tree: PyTree) -> PyTree:
    """The tree with every leaf replaced by function("path/of/the/leaf")."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: function(jax.tree_util.keystr(path, simple=True, separator="/")), tree
    )


def _decays(path: str) -> bool:
    return path.rsplit("/", 1)[-1] not in ("bias", "scale")


def scale_by_path(multipliers: tuple[tuple[str, float], ...]) -> optax.GradientTransformation:
    """Scales the update of each parameter by the factor of the first pattern found in its path.

    Adam's steps do not depend on the gradient's scale, so behind AdamW this is a learning rate
    of its own. Raises UsageError at init for a pattern that matches no parameter.
    """
    factors = {f"{index}": factor for index, (_, factor) in enumerate(multipliers)}

    def label(path: str) -> str:
        for index, (pattern, _) in enumerate(multipliers):
            if re.search(pattern, path):
                return f"{index}"
        return "rest"

    def labels(params: PyTree) -> PyTree:
        found = map_by_path(label, params)
        used = set(jax.tree.leaves(found))
        for index, (pattern, _) in enumerate(multipliers):
            if f"{index}" not in used:
                paths = sorted(jax.tree.leaves(map_by_path(lambda path: path, params)))
                raise UsageError(
                    f"optimizer.multipliers: {pattern!r} is found in no parameter path "
                    f"(or an earlier pattern takes them all); paths are {', '.join(paths)}"
                )
        return found

    transforms = {name: optax.scale(factor) for name, factor in factors.items()}
    return optax.partition({**transforms, "rest": optax.identity()}, labels)
