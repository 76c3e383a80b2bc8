"""jax-extractor evaluate RUN [--split train]"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jax_extractor.cli.arguments import parse
from jax_extractor.errors import UsageError


@dataclass(frozen=True)
class Arguments:
    """Loss, bits per byte and perplexity of a run's model on a whole split of its text."""

    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(name="RUN")]
    """The run directory."""
    split: Literal["validation", "train"] = "validation"
    """Which part of the text."""
    step: int | None = None
    """Which checkpoint; the latest if none is named."""
    batches: int | None = None
    """At most this many batches, evenly spaced; all if none is named."""


def run(arguments: list[str]) -> None:
    """Evaluates and prints one line a figure."""
    chosen = parse(Arguments, arguments, prog="evaluate")
    if chosen.batches is not None and chosen.batches < 1:
        raise UsageError(f"--batches {chosen.batches}: choose at least 1")
    # Only now, so that bad usage is told at once: this brings jax, which takes seconds.
    from jax_extractor.training.evaluation import evaluate_run

    step, found = evaluate_run(
        chosen.run_dir, split=chosen.split, step=chosen.step, limit=chosen.batches
    )
    print(f"step            {step}")
    print(f"loss            {found.loss:.4f} nats per token")
    print(f"bits per byte   {found.bits_per_byte:.4f}")
    print(f"perplexity      {found.perplexity:.4f}")
    print(f"tokens          {found.tokens}")
    print(f"bytes           {found.bytes}")
