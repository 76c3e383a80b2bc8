"""jax-extractor evaluate: its figures are those of `evaluate_run`, its refusals one line."""

import shutil

import pytest

from jax_extractor.cli import main
from jax_extractor.training.evaluation import evaluate_run

pytestmark = pytest.mark.usefixtures("quick_compilation")


def evaluated(capfd, *arguments):
    """The figures that the command prints, by their names."""
    assert main(["evaluate", *map(str, arguments)]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    return {line[:16].strip(): line[16:].split()[0] for line in out.splitlines()}


@pytest.mark.parametrize(
    "flags, options",
    [
        ([], {}),
        (["--split", "train"], {"split": "train"}),
        (["--batches", "1", "--step", "3"], {"limit": 1, "step": 3}),
    ],
)
def test_figures(flags, options, tiny_run, capfd):
    step, expected = evaluate_run(tiny_run, **options)
    assert evaluated(capfd, tiny_run, *flags) == {
        "step": str(step),
        "loss": f"{expected.loss:.4f}",
        "bits per byte": f"{expected.bits_per_byte:.4f}",
        "perplexity": f"{expected.perplexity:.4f}",
        "tokens": str(expected.tokens),
        "bytes": str(expected.bytes),
    }


@pytest.fixture
def refused(capfd):
    def run(status, *arguments):
        assert main(["evaluate", *map(str, arguments)]) == status
        out, err = capfd.readouterr()
        assert out == ""
        assert err.startswith("jax-extractor: ") and err.endswith("\n") and err.count("\n") == 1
        return err

    return run


def test_bad_usage(tiny_run, refused):
    assert "RUN" in refused(2).upper()
    assert "--batches 0: choose at least 1" in refused(2, tiny_run, "--batches", 0)
    line = refused(2, tiny_run, "--split", "test")
    assert all(word in line for word in ("test", "validation", "train"))
    assert "--stpe" in refused(2, tiny_run, "--stpe", 3)


def test_no_run(tiny_run, tmp_path, refused):
    assert "is not a run directory" in refused(1, tmp_path)
    assert "is not a run directory" in refused(1, tmp_path / "none")
    assert "has no checkpoint of step 2: choose one of 3" in refused(1, tiny_run, "--step", 2)
    run = shutil.copytree(tiny_run, tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    assert "has no checkpoint: train it first" in refused(1, run)


@pytest.mark.parametrize("what", ["flipped bits", "missing files", "empty files"])
def test_a_damaged_checkpoint(what, tiny_run, tmp_path, array_files, refused):
    run = shutil.copytree(tiny_run, tmp_path / "run")
    for path in array_files(run / "checkpoints" / "3"):
        if what == "flipped bits":
            path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
        elif what == "empty files":
            path.write_bytes(b"")
        else:
            path.unlink()
    line = refused(1, run)
    assert "checkpoints/3 is damaged: " in line and "remove that folder" in line
