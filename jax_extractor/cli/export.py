"""jax-extractor export RUN --out FILE [--batch-size B --prompt-width P --temperature T …]"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jax_extractor.cli.arguments import parse
from jax_extractor.generation.export import PLATFORMS, ExportConfig, export_model
from jax_extractor.training.run import open_run


@dataclass(frozen=True)
class Arguments:
    """Writes a run's model with its sampling as one file that runs without this package."""

    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run directory."""
    out: Path
    """The file to write, a zip; its README.md tells how to run it."""
    config: Annotated[ExportConfig, tyro.conf.OmitArgPrefixes] = dataclasses.field(
        default_factory=ExportConfig
    )
    step: int | None = None
    """Which checkpoint; the latest if none is named."""


def run(arguments: list[str]) -> None:
    """Writes the file and tells its size."""
    chosen = parse(Arguments, arguments, prog="export")
    chosen.config.check()
    export_model(open_run(chosen.run_dir, chosen.step), chosen.out, chosen.config)
    size = chosen.out.stat().st_size / 1e6
    print(f"{chosen.out}: {size:.1f} MB for {', '.join(PLATFORMS)}; see the README.md inside")
