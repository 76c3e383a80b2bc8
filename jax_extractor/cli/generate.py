"""jax-extractor generate RUN --prompt TEXT --max-tokens N [--temperature T …]"""

import codecs
import dataclasses
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jax_extractor.cli.arguments import parse
from jax_extractor.errors import InputError, UsageError
from jax_extractor.generation import GenerationConfig, Piece, stream
from jax_extractor.training.run import open_run


@dataclass(frozen=True)
class Arguments:
    """Writes on after a prompt; the text appears as it is made."""

    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run directory."""
    generation: Annotated[
        GenerationConfig, tyro.conf.OmitArgPrefixes, tyro.conf.UseAppendAction
    ] = dataclasses.field(default_factory=GenerationConfig)
    prompt: str = ""
    """What the text begins with; without one, the model is shown a line break."""
    prompts_file: str = ""
    """A UTF-8 file of prompts, one a line, in place of --prompt; - reads standard input."""
    json: bool = False
    """Print a line of JSON for each text: prompt, sample, text, tokens, log_probabilities (nats,
    of the unmodified model), stopped."""
    step: int | None = None
    """Which checkpoint; the latest if none is named."""


def run(arguments: list[str]) -> None:
    """Prints each prompt and, as it is made, its text."""
    chosen = parse(Arguments, arguments, prog="generate")
    for stop in chosen.generation.stop:
        if not stop:
            raise UsageError("--stop '' is empty: give the text to stop before, or leave it out")
        check_text("--stop", stop)
    chosen.generation.check()
    prompts = read_prompts(chosen)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # what a model writes is UTF-8 in any locale
    pieces = stream(open_run(chosen.run_dir, chosen.step), prompts, chosen.generation)
    if chosen.json:
        print_json(in_order(pieces))
    else:
        print_text(in_order(pieces), prompts, chosen.generation.samples)


def read_prompts(chosen: Arguments) -> list[str]:
    """The prompts of the command line, or of the file or standard input that it names."""
    check_text("--prompt", chosen.prompt)
    if not chosen.prompts_file:
        return [chosen.prompt]
    if chosen.prompt:
        raise UsageError("--prompt and --prompts-file exclude each other: choose one")
    name = "standard input" if chosen.prompts_file == "-" else chosen.prompts_file
    try:
        if chosen.prompts_file == "-":
            data = sys.stdin.buffer.read()
        else:
            data = Path(chosen.prompts_file).read_bytes()
        data = data.removeprefix(codecs.BOM_UTF8)
        text = data.decode("utf-8")
    except OSError as error:
        raise InputError(
            f"--prompts-file {name} cannot be read ({error.strerror}): name a text file of "
            "prompts, or - for standard input"
        ) from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"--prompts-file {name} is not UTF-8 (byte 0x{data[error.start]:02x} in line {line}): "
            "convert it"
        ) from error
    if not text:
        raise InputError(f"--prompts-file {name} is empty: give one prompt a line")
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")


def check_text(flag: str, text: str) -> None:
    """Raises UsageError for bytes of the command line that were not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        # Python reads an undecodable byte 0xNN as the lone surrogate U+DCNN.
        byte = ord(text[error.start]) - 0xDC00
        raise UsageError(
            f"{flag} is not UTF-8 (byte 0x{byte & 0xFF:02x} at position {error.start}): "
            "pass text in UTF-8"
        ) from None


def in_order(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """The pieces of text 0 as they come, then those of text 1, and so on."""
    current = 0
    waiting: dict[int, list[Piece]] = {}
    for piece in pieces:
        waiting.setdefault(piece.row, []).append(piece)
        while current in waiting:
            ready = waiting.pop(current)
            yield from ready
            if ready[-1].completion is None:
                break
            current += 1


def print_json(pieces: Iterator[Piece]) -> None:
    """A line for each finished text."""
    for piece in pieces:
        if piece.completion is not None:
            line = json.dumps(dataclasses.asdict(piece.completion), ensure_ascii=False)
            print(line, flush=True)


def print_text(pieces: Iterator[Piece], prompts: list[str], samples: int) -> None:
    """Each prompt with its text, under a line that counts them where there are several."""
    total, begun = len(prompts) * samples, -1
    for piece in pieces:
        if piece.row > begun:
            begun = piece.row
            heading = f"--- {begun + 1} of {total} ---\n" if total > 1 else ""
            sys.stdout.write(heading + prompts[begun // samples])
        sys.stdout.write(piece.text)
        if piece.completion is not None:
            sys.stdout.write("\n")
        sys.stdout.flush()
