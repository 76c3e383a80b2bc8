"""Finds the command, runs it, and turns what went wrong into one line and an exit status.

0 done, 1 failed (a file, a disk, a corpus, a run), 2 bad usage (a name, a field, a size).
"""

import contextlib
import importlib
import os
import sys

from jax_extractor.errors import InputError, UsageError

#: Each command with its line of help; the module of that name in this folder has `run(arguments)`.
COMMANDS = {
    "train": "train an experiment in a run directory, or go on with it",
    "evaluate": "loss, bits per byte and perplexity of a run on its validation text",
    "generate": "write text with a run",
    "export": "a model with its sampling as one file that runs without this package",
    "compare": "validation losses of runs beside the fields in which they differ",
    "mixings": "a picture of the head-mixing matrices that a run has learned",
    "bench": "time and memory beside the peers, in one run",
    "cost": "parameters, multiplications and measured time of each mixer",
}

USAGE = (
    "usage: jax-extractor COMMAND …   (jax-extractor COMMAND --help tells more)\n\n"
    + "\n".join(f"  {name:<10} {line}" for name, line in COMMANDS.items())
)


def main(arguments: list[str] | None = None) -> int:
    """Runs one command line; returns the exit status."""
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else arguments)
        finally:
            sys.stdout.flush()  # --help leaves by SystemExit, and is flushed as well
    except UsageError as error:
        return _fail(error, 2)
    except InputError as error:
        return _fail(error, 1)
    except BrokenPipeError:
        _give_up_output()  # the reader (head, less) has enough
        return 1
    except OSError as error:
        if error.filename is None:
            _give_up_output()
        where = error.filename or "standard output"
        return _fail(f"{where}: {error.strerror or error}: make room or choose another place", 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 1)
    except (MemoryError, RuntimeError) as error:
        if not _memory_is_full(error):
            raise
        return _fail(
            f"out of memory ({error}): lower the model's sizes or train.batch_size, "
            "or raise train.accumulate",
            1,
        )


def _run(arguments: list[str]) -> int:
    """Runs the command that the first argument names, or tells which there are."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in COMMANDS:
        raise UsageError(f"unknown command {name!r}: choose one of {', '.join(COMMANDS)}")
    importlib.import_module(f"jax_extractor.cli.{name}").run(rest)
    return 0


def _give_up_output() -> None:
    """What is still buffered goes nowhere, so that Python does not fail on it again at its end."""
    with contextlib.suppress(OSError, ValueError):  # no file behind it, as under a test
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _memory_is_full(error: Exception) -> bool:
    """XLA tells it as a RuntimeError of its own, which this module does not import jax to name."""
    words = ("RESOURCE_EXHAUSTED", "Out of memory")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def _fail(error: Exception | str, status: int) -> int:
    print(f"jax-extractor: {' '.join(str(error).split())}", file=sys.stderr)
    return status
