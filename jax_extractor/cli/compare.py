"""jax-extractor compare RUN RUN …"""

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jax_extractor.cli.arguments import parse
from jax_extractor.errors import InputError, UsageError


@dataclass(frozen=True)
class Arguments:
    """Validation losses of runs beside the fields in which they differ, the best first.

    Runs that differ in train.seed alone share a row: mean ± standard deviation over the seeds.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(name="RUN")]
    """The run directories."""


@dataclass(frozen=True)
class Outcome:
    """A run's fields, flat, and its last validation loss."""

    fields: Mapping[str, str]
    step: int
    loss: float


def run(arguments: list[str]) -> None:
    """Prints one row a configuration."""
    chosen = parse(Arguments, arguments, prog="compare")
    if not chosen.runs:
        raise UsageError("compare needs run directories: jax-extractor compare RUN RUN …")
    runs = {path.resolve(): path for path in chosen.runs}  # a run named twice counts once
    print("\n".join(table([read_outcome(path) for path in runs.values()])))


def read_outcome(directory: Path) -> Outcome:
    """What a run directory says of itself; InputError where there is no run, or no loss yet."""
    # Only now, so that bad usage is told at once: this brings jax, which takes seconds.
    from jax_extractor.training.metrics import read_metrics
    from jax_extractor.training.run import read_config

    rows = [row for row in read_metrics(directory) if "val_loss" in row]
    if not rows:
        raise InputError(f"{directory} has no validation loss yet: train it to its first look")
    return Outcome(
        dict(flatten(read_config(directory))), int(rows[-1]["step"]), rows[-1]["val_loss"]
    )


def flatten(values: dict, prefix: str = "") -> list[tuple[str, str]]:
    """Nested fields as (dotted name, JSON of the value)."""
    pairs = []
    for name, value in values.items():
        if isinstance(value, dict):
            pairs += flatten(value, f"{prefix}{name}.")
        else:
            pairs.append((prefix + name, json.dumps(value)))
    return pairs


def table(outcomes: list[Outcome]) -> list[str]:
    """The rows as text, aligned."""
    names = sorted({name for outcome in outcomes for name in outcome.fields} - {"train.seed"})
    differing = [n for n in names if len({outcome.fields.get(n) for outcome in outcomes}) > 1]
    groups: dict[tuple, list[Outcome]] = {}
    for outcome in outcomes:
        key = (*(outcome.fields.get(n, "–").strip('"') for n in differing), str(outcome.step))
        groups.setdefault(key, []).append(outcome)
    rows = [[*differing, "step", "val_loss", "±", "seeds"]]
    for key, members in sorted(groups.items(), key=lambda item: mean_loss(item[1])):
        losses = [member.loss for member in members]
        spread = f"{statistics.stdev(losses):.4f}" if len(losses) > 1 else "–"
        rows.append([*key, f"{mean_loss(members):.4f}", spread, str(len(losses))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def mean_loss(outcomes: list[Outcome]) -> float:
    """The mean over seeds; a diverged one sorts last."""
    mean = statistics.fmean(outcome.loss for outcome in outcomes)
    return math.inf if math.isnan(mean) else mean
