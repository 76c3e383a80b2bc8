"""The front door: exit statuses, one line for each failure, and jax only when it is needed."""

import os
import subprocess
import sys
import types

import pytest

from jax_extractor.cli import main
from jax_extractor.cli.main import COMMANDS
from jax_extractor.errors import InputError, UsageError

DOOR = sys.modules["jax_extractor.cli.main"]


def with_command(monkeypatch, run):
    """Puts a function in the place of every command."""
    module = types.SimpleNamespace(run=run)
    monkeypatch.setattr(DOOR.importlib, "import_module", lambda name: module)


def test_help_lists_the_commands(capsys):
    for flag in ("-h", "--help"):
        assert main([flag]) == 0
        out, err = capsys.readouterr()
        assert err == "" and out.startswith("usage: jax-extractor COMMAND")
        assert all(f"  {name} " in out for name in COMMANDS)


def test_no_command_is_bad_usage(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("usage: jax-extractor COMMAND")


def test_an_unknown_command_lists_the_known(capsys):
    assert main(["trian"]) == 2
    assert capsys.readouterr() == (
        "",
        f"jax-extractor: unknown command 'trian': choose one of {', '.join(COMMANDS)}\n",
    )


@pytest.mark.parametrize(
    "error, status, line",
    [
        (UsageError("field=3: choose 4"), 2, "field=3: choose 4"),
        (InputError("a file\n  is gone"), 1, "a file is gone"),
        (
            OSError(28, "No space left on device", "x"),
            1,
            "x: No space left on device: make room or choose another place",
        ),
        (KeyboardInterrupt(), 1, "interrupted"),
        (MemoryError("4 GB"), 1, "out of memory (4 GB): lower the model's sizes"),
        (RuntimeError("RESOURCE_EXHAUSTED: 9 GB"), 1, "out of memory (RESOURCE_EXHAUSTED: 9 GB)"),
        (RuntimeError("INTERNAL: Out of memory allocating 9 bytes."), 1, "out of memory (INTERNAL"),
    ],
)
def test_an_error_is_one_line_and_a_status(error, status, line, monkeypatch, capsys):
    def run(arguments):
        raise error

    with_command(monkeypatch, run)
    assert main(["train", "x"]) == status
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"jax-extractor: {line}") and err.count("\n") == 1


def test_a_bug_keeps_its_traceback(monkeypatch):
    def run(arguments):
        raise RuntimeError("a bug")

    with_command(monkeypatch, run)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["train"])


def test_arguments_reach_the_command(monkeypatch):
    seen = []
    with_command(monkeypatch, seen.append)
    assert main(["evaluate", "run", "--step", "3"]) == 0
    assert seen == [["run", "--step", "3"]]


QUICK = """
import sys
from jax_extractor.cli import main
for arguments in (["--help"], [], ["trian"], ["train"], ["train", "none.py"], ["evaluate"],
                  ["evaluate", "--help"], ["evaluate", "run", "--split", "test"]):
    try:
        main(arguments)
    except SystemExit:
        pass
    assert "jax" not in sys.modules, arguments
"""


def test_help_and_bad_usage_do_not_wait_for_jax():
    done = subprocess.run([sys.executable, "-c", QUICK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("jax-ext")]) == 5


@pytest.fixture(params=["1", ""], ids=["unbuffered", "buffered"])
def environment(request):
    """Python writes at once, or at its end, where a failure is easily overlooked."""
    return os.environ | {"PYTHONUNBUFFERED": request.param}


@pytest.mark.parametrize("arguments", [["--help"], ["evaluate", "--help"]], ids=" ".join)
def test_a_reader_that_has_enough(arguments, environment):
    """As in `jax-extractor --help | head -1`: nothing is said about the broken pipe."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "jax_extractor", *arguments]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("arguments", [["--help"], ["evaluate", "--help"]], ids=" ".join)
def test_an_output_without_room(arguments, environment):
    command = [sys.executable, "-m", "jax_extractor", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment
        )
    told = "jax-extractor: standard output: No space left on device: make room"
    assert done.returncode == 1
    assert done.stderr.startswith(told) and done.stderr.count("\n") == 1
