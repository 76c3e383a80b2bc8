"""jax-extractor compare: runs are grouped over seeds, the best first, differing fields named."""

import json

import pytest

from jax_extractor.cli import main


def write_run(directory, loss, *, mixer="ishe", seed=0, step=10):
    directory.mkdir()
    config = {"model": {"mixer": mixer, "features": 8}, "train": {"seed": seed}}
    (directory / "config.json").write_text(json.dumps(config))
    rows = [{"step": 5, "val_loss": 9.0}, {"step": step, "loss": 1.0, "val_loss": loss}]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(directory)


def test_groups_seeds_and_sorts(tmp_path, capsys):
    runs = [
        write_run(tmp_path / "a", 2.0, mixer="mha"),
        write_run(tmp_path / "b", 1.0, seed=0),
        write_run(tmp_path / "c", 1.5, seed=1),
        str(tmp_path / "a" / ".." / "b"),
    ]
    assert main(["compare", *runs]) == 0
    header, best, worst = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header == ["model.mixer", "step", "val_loss", "±", "seeds"]
    assert best == ["ishe", "10", "1.2500", "0.3536", "2"]
    assert worst == ["mha", "10", "2.0000", "–", "1"]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [([], 2, "compare needs run directories"), (["missing"], 1, "missing is no run directory")],
)
def test_refuses(arguments, status, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *arguments]) == status
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_refuses_a_run_without_a_look(tmp_path, capsys):
    directory = tmp_path / "a"
    write_run(directory, 1.0)
    (directory / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert main(["compare", str(directory)]) == 1
    assert "has no validation loss yet" in capsys.readouterr().err
