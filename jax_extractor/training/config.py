"""The configuration of an experiment: typed frozen dataclasses, checked before anything runs."""

import dataclasses
import re
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from jax_extractor.data import DataConfig
from jax_extractor.errors import InputError, UsageError, unknown_name
from jax_extractor.models import ModelConfig


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with warm-up, schedule, clipping and learning-rate multipliers by parameter path."""

    learning_rate: float = 3e-3
    """Peak learning rate, reached at the end of the warm-up."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """What follows the warm-up."""
    warmup_steps: int = 100
    """Steps over which the rate rises linearly from 0; at most a tenth of all steps is used."""
    final_fraction: float = 0.1
    """Where a cosine schedule ends, as a fraction of the peak."""
    weight_decay: float = 0.01
    """Decoupled weight decay; norms and biases have none."""
    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.95
    """Decay of the second moment."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 leaves them alone."""
    multipliers: tuple[tuple[str, float], ...] = ()
    """Pairs of a regular expression and a factor: parameters in whose path, for example
    core/layers_0/mixer/kernel, it is found learn at that factor of the rate; the first match counts."""

    def check(self) -> None:
        """Raises UsageError naming the first field that does not fit."""
        for name in ("learning_rate", "weight_decay", "clip_norm", "warmup_steps"):
            if not getattr(self, name) >= 0:
                raise UsageError(f"optimizer.{name}={getattr(self, name)}: choose 0 or more")
        for name in ("learning_rate", "weight_decay"):
            if getattr(self, name) == float("inf"):
                raise UsageError(f"optimizer.{name}=inf: choose a finite number, 0 or more")
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(
                    f"optimizer.{name}={getattr(self, name)}: choose from 0 to below 1"
                )
        if not 0 <= self.final_fraction <= 1:
            raise UsageError(f"optimizer.final_fraction={self.final_fraction}: choose from 0 to 1")
        for pattern, factor in self.multipliers:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UsageError(
                    f"optimizer.multipliers: {pattern!r} is not a regular expression ({error}): "
                    "mend it, or put a backslash before the character"
                ) from None
            if not factor >= 0:
                raise UsageError(
                    f"optimizer.multipliers: {pattern!r} has the factor {factor}: choose 0 or more"
                )


@dataclass(frozen=True)
class TrainConfig:
    """Steps, batches, seeds, how often to look and to save, and how devices share the work."""

    steps: int = 1000
    """Optimizer steps in all."""
    batch_size: int = 16
    """Sequences of a step, over all devices and micro-batches."""
    accumulate: int = 1
    """Micro-batches whose gradients are summed before a step."""
    seed: int = 0
    """Seed of the parameters, the batches and the dropout."""
    log_every: int = 10
    """Steps between rows of metrics.jsonl."""
    eval_every: int = 250
    """Steps between looks at the validation part; 0: at the end only."""
    eval_batches: int = 16
    """Batches of such a look, spread evenly; `evaluate` reads the whole part."""
    checkpoint_every: int = 250
    """Steps between checkpoints; the last step is saved always."""
    keep_checkpoints: int = 2
    """How many checkpoints stay on disk."""
    parallel: Literal["jit", "pmap"] = "jit"
    """jit over a (data, model) mesh, or the same step under pmap (data parallel only)."""
    model_devices: int = 1
    """Size of the mesh's model axis; all devices divided by it make the data axis."""

    def check(self) -> None:
        """Raises UsageError naming the first field that does not fit."""
        at_least_one = (
            "steps",
            "batch_size",
            "accumulate",
            "log_every",
            "eval_batches",
            "checkpoint_every",
            "keep_checkpoints",
            "model_devices",
        )
        for name in at_least_one:
            if getattr(self, name) < 1:
                raise UsageError(f"train.{name}={getattr(self, name)}: choose at least 1")
        if self.eval_every < 0:
            raise UsageError(f"train.eval_every={self.eval_every}: choose 0 or more")
        if not 0 <= self.seed < 2**31:
            raise UsageError(f"train.seed={self.seed}: choose from 0 to {2**31 - 1}")
        if self.batch_size % self.accumulate:
            raise UsageError(
                f"train.batch_size={self.batch_size} is not divisible by "
                f"train.accumulate={self.accumulate}: choose a multiple"
            )
        if self.parallel == "pmap" and self.model_devices != 1:
            raise UsageError(
                f"train.model_devices={self.model_devices} with train.parallel=pmap: "
                "pmap shares batches only; choose jit"
            )


@dataclass(frozen=True)
class Config:
    """Everything that decides a run's numbers."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def check(self) -> None:
        """Raises UsageError naming the first field that does not fit."""
        _check_types(self)
        self.model.check()
        self.data.check()
        self.optimizer.check()
        self.train.check()


def _check_types(config: Any, prefix: str = "") -> None:
    """An experiment file is not type-checked before it runs, so its values are checked here."""
    for name, hint in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(hint) and isinstance(value, typing.cast(type, hint)):
            _check_types(value, f"{prefix}{name}.")
        elif typing.get_origin(hint) is Literal:
            if value not in typing.get_args(hint):
                raise unknown_name(f"{prefix}{name}", str(value), typing.get_args(hint))
        elif not _fits(hint, value):
            wanted = hint.__name__ if isinstance(hint, type) else hint
            raise UsageError(
                f"{prefix}{name}={value!r} is a {type(value).__name__}: it must be {wanted}"
            )


def _fits(hint: Any, value: Any) -> bool:
    if hint in (int, float):
        kinds = (int, float) if hint is float else (int,)
        return isinstance(value, kinds) and not isinstance(value, bool)
    if isinstance(hint, types.UnionType):
        return any(_fits(kind, value) for kind in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        kinds = typing.get_args(hint)
        if not isinstance(value, tuple):
            return False
        if kinds[-1] is Ellipsis:
            return all(_fits(kinds[0], v) for v in value)
        return len(value) == len(kinds) and all(map(_fits, kinds, value))
    return isinstance(value, hint)


def to_dict(config: Any) -> dict:
    """A configuration as nested dictionaries and lists, ready for JSON."""
    return {
        f.name: to_dict(value) if dataclasses.is_dataclass(value) else _plain(value)
        for f in dataclasses.fields(config)
        for value in [getattr(config, f.name)]
    }


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def from_dict(cls: type, values: Any) -> Any:
    """The configuration that `to_dict` wrote; InputError names a field this version lacks."""
    if not isinstance(values, dict):
        raise InputError(f"stored configuration has {values!r} where {cls.__name__} should be")
    known = {f.name for f in dataclasses.fields(cls)}
    for name in values:
        if name not in known:
            raise InputError(
                f"stored configuration has the field {name!r}, unknown to this version"
            )
    hints = typing.get_type_hints(cls)
    return cls(**{name: _typed(hints[name], value) for name, value in values.items()})


def _typed(hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value)
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return value
    return _tupled(value)


def _tupled(value: Any) -> Any:
    return tuple(_tupled(v) for v in value) if isinstance(value, list) else value


def differences(old: dict, new: dict, prefix: str = "") -> list[str]:
    """Fields in which two `to_dict` results differ, as `train.seed: 0 -> 1`."""
    lines = []
    for name in sorted(old.keys() | new.keys()):
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += differences(a, b, f"{prefix}{name}.")
        elif a != b:
            lines.append(f"{prefix}{name}: {a} -> {b}")
    return lines
