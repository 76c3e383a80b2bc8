"""jax-extractor mixings RUN --out FILE"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jax_extractor.cli.arguments import parse


@dataclass(frozen=True)
class Arguments:
    """Draws the learned head-mixing matrices of a run and prints how far they are from the identity."""

    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run directory."""
    out: Path = Path("mixings.png")
    """The picture, .png or .svg."""
    step: int | None = None
    """Which checkpoint; the latest if none is named."""


def run(arguments: list[str]) -> None:
    """Writes the picture and one line a matrix."""
    chosen = parse(Arguments, arguments, prog="mixings")
    # Only now, so that bad usage is told at once: this brings jax, which takes seconds.
    import numpy as np

    from jax_extractor.analysis.mixing import check_picture, plot_mixings
    from jax_extractor.training.run import open_run

    check_picture(chosen.out)
    for name, matrix in plot_mixings(
        open_run(chosen.run_dir, chosen.step).params, chosen.out
    ).items():
        distance = np.linalg.norm(matrix - np.eye(*matrix.shape)) / np.linalg.norm(matrix)
        print(f"{name}  {matrix.shape[0]}×{matrix.shape[1]}  ‖P − I‖/‖P‖ = {distance:.3f}")
    print(f"drawn in {chosen.out}")
