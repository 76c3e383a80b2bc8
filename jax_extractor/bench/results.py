"""Where a measurement's files go: checked before it starts, written when it is done."""

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jax_extractor.errors import InputError, UsageError
from jax_extractor.files import reason


def check_writable(json: Path | None, plot: Path | None = None) -> None:
    """Raises InputError for what could not be written at the end of a long measurement."""
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise InputError(
            "plot needs matplotlib: pip install 'jax_extractor[plots]', or leave it out"
        )
    if plot is not None and plot.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"plot={plot}: name a file that ends in .png, .svg or .pdf")
    if plot is not None and plot == json:
        raise UsageError(f"json and plot are the same file {plot}: name two")
    for path in (json, plot):
        if path is not None:
            with _storage(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.open("ab").close()


def write_json(path: Path | None, content: Any) -> None:
    """Writes what JSON can say, paths as text; does nothing for None."""
    if path is not None:
        with _storage(path):
            path.write_text(json.dumps(content, indent=1, default=str) + "\n")


@contextmanager
def _storage(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {path}: {reason(error)}; choose another file") from error
