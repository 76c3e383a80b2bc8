"""Command-line arguments as dataclasses, read by tyro; what it refuses becomes one line."""

import contextlib
import io
import os
import re
import sys
from typing import Any, TypeVar
from unittest import mock

import tyro

from jax_extractor.errors import UsageError

T = TypeVar("T")

#: Python's own words for a text that is no number, and ours.
NUMBERS = {
    r"invalid literal for int\(\) with base 10": "a whole number: give one, such as 10",
    "could not convert string to float": "a number: give one, such as 0.01",
}


def parse(cls: type[T], arguments: list[str], *, prog: str, default: Any = None) -> T:
    """An instance of the dataclass made from the arguments; UsageError where they do not fit.

    `--help` prints the fields with their docstrings and exits with 0.
    """
    options = {} if default is None else {"default": default}
    said = io.StringIO()
    wanted = any(a in ("-h", "--help") for a in arguments)
    # tyro draws a box as wide as the terminal; a wide one keeps its sentences in one piece.
    wide = contextlib.nullcontext() if wanted else mock.patch.dict(os.environ, COLUMNS="1000")
    try:
        with contextlib.redirect_stderr(said), wide:
            return tyro.cli(cls, args=arguments, prog=f"jax-extractor {prog}", **options)
    except SystemExit as end:
        if end.code in (0, None):
            sys.stderr.write(said.getvalue())
            raise
        line = _one_line(said.getvalue())
        if re.fullmatch("Unrecognized options: (True|False|true|false)", line):
            value = line.split()[-1]
            line = f"{value} stands alone: a field is set with --NAME and unset with --no-NAME"
        if "Unrecognized options" in line and "Perhaps you meant" not in line:
            line = f"{line}: jax-extractor {prog} --help lists the known ones"
        raise UsageError(line) from None


def _one_line(box: str) -> str:
    """The sentences inside tyro's box, without its drawing and its pointer to --help."""
    words = re.sub(r"\x1b\[[0-9;]*m", "", box)
    words = re.sub(r"^╭.*$|^╰.*$|^\+-.*$|[│─]|-{4,}", " ", words, flags=re.MULTILINE)
    words = re.split(r"For full helptext|Argument helptext", words)[0]
    line = " ".join(words.split())
    for python, plain in NUMBERS.items():
        union = "(?:no type matching .*)?"  # what may also be None
        line = re.sub(
            rf"Error parsing (\S+): {union}{python}: (.*)", rf"\1 \2 is not {plain}", line
        )
    return line
