"""jax-extractor cost [--batch-size B --length T --features D --mixers ishe mha …]"""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from jax_extractor.analysis.cost import Cost, Sizes, costs
from jax_extractor.cli.arguments import parse
from jax_extractor.mixers import MIXERS


@dataclass(frozen=True)
class Arguments:
    """Parameters, multiplications, measured time and memory of each mixer at given sizes."""

    sizes: Annotated[Sizes, tyro.conf.OmitArgPrefixes] = field(default_factory=Sizes)
    mixers: tuple[str, ...] = tuple(MIXERS)
    """Which mixers."""
    measure: bool = True
    """Whether to run them; otherwise only what follows from the sizes is shown."""
    repeats: int = 7
    """Measured runs of each mixer, of which the median is shown."""
    json: bool = False
    """Print a line of JSON for each mixer."""


def run(arguments: list[str]) -> None:
    """Prints the table."""
    chosen = parse(Arguments, arguments, prog="cost")
    rows = costs(chosen.sizes, chosen.mixers, measure=chosen.measure, repeats=chosen.repeats)
    if chosen.json:
        for row in rows:
            print(json.dumps(dataclasses.asdict(row)))
    else:
        print(table(rows, chosen.sizes, chosen.measure))


def table(rows: list[Cost], sizes: Sizes, measured: bool) -> str:
    """The rows under their headings, in columns."""
    headings = ["mixer", "parameters", "multiplications", "× mha", "method"]
    if measured:
        headings += ["forward ms", "× mha", "fwd+bwd ms", "temporary MiB"]
    lines = [headings] + [_cells(row)[: len(headings)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = (0, headings.index("method"))

    def aligned(cells: list[str]) -> str:
        columns = enumerate(zip(cells, widths, strict=True))
        return "  ".join(
            c.ljust(width) if i in left else c.rjust(width) for i, (c, width) in columns
        ).rstrip()

    about = (
        f"one layer, {sizes.length} positions of {sizes.features} features, "
        f"{sizes.offsets} offsets, {sizes.num_heads} heads; multiplications of one sequence forward"
    )
    if measured:
        about += f"; times of a batch of {sizes.batch_size}"
    return "\n".join([about, "", *map(aligned, lines)])


def _cells(row: Cost) -> list[str]:
    memory = None if row.temporary_bytes is None else row.temporary_bytes / 2**20
    return [
        row.mixer if row.value_heads is None else f"{row.mixer}, h_v={row.value_heads}",
        f"{row.parameters:,}",
        _shown(row.multiplications, ","),
        _shown(row.multiplications_times_mha, ".3f"),
        row.method or "–",
        _shown(row.forward_ms, ".2f"),
        _shown(row.forward_times_mha, ".3f"),
        _shown(row.forward_backward_ms, ".2f"),
        _shown(memory, ".1f"),
    ]


def _shown(value: int | float | None, how: str) -> str:
    return "–" if value is None else format(value, how)
