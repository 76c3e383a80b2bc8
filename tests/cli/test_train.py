"""jax-extractor train: experiments, overrides of every field, and clear refusals."""

import dataclasses
import typing
from pathlib import Path

import pytest

import jax_extractor.training
from jax_extractor.cli import main
from jax_extractor.cli.experiment import load_experiment
from jax_extractor.training import Config, open_run, read_metrics

pytestmark = pytest.mark.usefixtures("quick_compilation", "one_device")

EXPERIMENT = """
from jax_extractor.data import DataConfig
from jax_extractor.models import ModelConfig
from jax_extractor.training import Config, TrainConfig


def get_config():
    return Config(
        model=ModelConfig(features=16, num_layers=1, max_length=8, ffn_features=16),
        data=DataConfig(source="files", files=({text!r},)),
        train=TrainConfig(steps=2, batch_size=8, eval_every=0, log_every=1, eval_batches=1),
    )
"""


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Some words, and then some more of them.\n" * 30)
    return path


@pytest.fixture
def experiment(tmp_path, text):
    path = tmp_path / "tiny.py"
    path.write_text(EXPERIMENT.format(text=str(text)))
    return path


@pytest.fixture
def refused(capfd):
    """A function that runs a command, checks status and its one line, and returns the line."""

    def run(status, *arguments):
        assert main([str(a) for a in arguments]) == status
        out, err = capfd.readouterr()
        assert out == ""
        assert err.startswith("jax-extractor: ") and err.endswith("\n") and err.count("\n") == 1
        return err

    return run


def fields(config, prefix=""):
    """(name with dots, type, value) of every field."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from fields(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", hints[field.name], value


def flag(name):
    return f"--{name.replace('_', '-')}"


def another(name, hint, value):
    """(arguments, value) that set a field to what it is not."""
    if typing.get_origin(hint) is typing.Literal:
        choice = next(c for c in typing.get_args(hint) if c != value)
        return [flag(name), choice], choice
    if hint is bool:
        *parents, last = flag(name)[2:].split(".")
        switch = ".".join([*parents, f"no-{last}" if value else last])
        return [f"--{switch}"], not value
    if hint == tuple[str, ...]:
        return [flag(name), "a.txt", "b.txt"], ("a.txt", "b.txt")
    if hint == tuple[tuple[str, float], ...]:
        return [flag(name), "kernel", "0.5"], (("kernel", 0.5),)
    if hint is str:
        return [flag(name), "other"], "other"
    new = 7 if hint in (int, int | None) else 0.375
    return [flag(name), str(new)], new


def test_every_field_has_a_flag_in_help(experiment, capsys):
    for arguments in (["train", "--help"], ["train", str(experiment), "--help"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        out = capsys.readouterr().out
        assert "--run-dir" in out
        names = [name for name, _, _ in fields(Config())]
        assert len(names) > 35
        for name in names:
            assert f"{flag(name)} " in out or f"{flag(name)}," in out, name


def test_every_field_can_be_overridden(experiment, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(jax_extractor.training, "train", lambda *args: seen.append(args))
    default = load_experiment(experiment)
    arguments, expected = [], {}
    for name, hint, value in fields(default):
        flags, expected[name] = another(name, hint, value)
        arguments += flags
        assert expected[name] != value, name
    assert main(["train", str(experiment), "--run-dir", str(tmp_path / "r"), *arguments]) == 0
    ((config, run_dir),) = seen
    assert {name: value for name, _, value in fields(config)} == expected
    assert run_dir == tmp_path / "r"


def test_a_run_and_its_words(experiment, tmp_path, capfd):
    run_dir = tmp_path / "run"
    command = ["train", str(experiment), "--run-dir", str(run_dir), "--train.steps", "3"]
    assert main(command) == 0
    out, err = capfd.readouterr()
    assert out == ""
    first, *steps, last = err.splitlines()
    assert first.startswith("ishe: 5,") or "parameters" in first
    assert [line.split()[1] for line in steps] == ["1/3", "2/3", "3/3"]
    assert last == f"trained: jax-extractor generate {run_dir} --prompt TEXT"
    assert [row["step"] for row in read_metrics(run_dir)] == [1, 2, 3]
    assert open_run(run_dir).config.train.steps == 3

    assert main(command) == 0  # again: nothing is left to do
    assert capfd.readouterr().err.splitlines() == [last]
    assert main([*command, "--train.seed", "1"]) == 1
    line = capfd.readouterr().err
    assert line.count("\n") == 1 and "another configuration (train.seed: 0 -> 1)" in line


@pytest.mark.parametrize(
    "source, told",
    [
        ("x = 1", "AttributeError: module 'experiment_bad' has no attribute 'get_config'"),
        ("def get_config(:", "SyntaxError"),
        ("import nothing_of_that_name", "ModuleNotFoundError: No module named 'nothing_of"),
        ("def get_config():\n    raise ValueError('one\\ntwo')", "ValueError: one two"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def get_config():\n    return 1 / 0", "ZeroDivisionError: division by zero"),
        ("def get_config():\n    return {}", "get_config() returned dict: return a jax_extractor"),
    ],
)
def test_an_experiment_that_fails(source, told, tmp_path, refused):
    bad = tmp_path / "bad.py"
    bad.write_text(source)
    line = refused(1, "train", bad, "--run-dir", tmp_path / "run")
    assert f"experiment {bad}" in line and told in line
    assert not (tmp_path / "run").exists()


def test_an_experiment_that_is_not_there(tmp_path, refused):
    for path in (tmp_path / "none.py", tmp_path):
        assert "is not a file: name one" in refused(1, "train", path, "--run-dir", tmp_path / "r")
    other = tmp_path / "experiment.txt"
    other.write_text("")
    assert "name one that ends in .py" in refused(2, "train", other)
    assert "train needs an experiment first" in refused(2, "train", "--run-dir", "r")


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--model.mixer attention", ["unknown model.mixer 'attention'", "ishe", "mha"]),
        ("--model.mixr she", ["--model.mixr", "--model.mixer"]),
        ("--data.source web", ["unknown data.source 'web'", "files", "stdlib"]),
        ("--model.positions relative", ["relative", "learned", "rotary"]),
        ("--train.parallel threads", ["threads", "jit", "pmap"]),
        ("--train.steps ten", ["train.steps", "ten"]),
        ("--train.steps 0", ["train.steps=0: choose at least 1"]),
        ("--model.features", ["--model.features"]),
        ("--model.mixer mha --model.num-heads 3", ["num_heads=3", "16"]),
        ("--train.accumulate 3", ["train.batch_size=8 is not divisible by train.accumulate=3"]),
        ("--train.model-devices 2", ["train.model_devices=2 does not divide the 1 devices"]),
        ("--model.positions learned", ["model.positions=learned with model.mixer=ishe"]),
        ("--optimizer.multipliers ( 2", ["'(' is not a regular expression"]),
        ("--optimizer.multipliers nothing 2", ["'nothing' is found in no parameter path"]),
        ("--optimizer.schedule linear", ["linear", "cosine", "constant"]),
        ("--model.extractor.method magic", ["magic", "scan"]),
    ],
)
def test_bad_usage(flags, words, experiment, tmp_path, refused):
    line = refused(2, "train", experiment, "--run-dir", tmp_path / "run", *flags.split())
    for word in words:
        assert word in line
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize("flags", [["--run-dir", ""], ["--run-dir="]])
def test_an_empty_run_directory(flags, experiment, refused):
    assert "--run-dir '' is empty: name a directory" in refused(2, "train", experiment, *flags)


def test_text_that_does_not_work(experiment, tmp_path, refused):
    def line(data: bytes | None):
        path = tmp_path / "bad.txt"
        path.unlink(missing_ok=True)
        if data is not None:
            path.write_bytes(data)
        run_dir = ["--run-dir", tmp_path / "run"]
        return refused(1, "train", experiment, *run_dir, "--data.files", path)

    assert "bad.txt (No such file" in line(None)
    assert "bad.txt is empty" in line(b"")
    assert "bad.txt is not UTF-8: byte 0xff at offset 100" in line(b"a" * 100 + b"\xff" * 50)
    assert "the corpus is too short" in line(b"short")
    assert "the corpus is too short" in line(b"a few words")
    pattern = tmp_path / "*.book"
    run_dir = ["--run-dir", tmp_path / "run"]
    assert "no file matches" in refused(1, "train", experiment, *run_dir, "--data.files", pattern)


def test_a_run_directory_that_does_not_work(experiment, text, refused):
    assert "is a file" in refused(1, "train", experiment, "--run-dir", text)
    assert "Not a directory" in refused(1, "train", experiment, "--run-dir", text / "run")
    assert "cannot write /proc/run" in refused(1, "train", experiment, "--run-dir", "/proc/run")


def test_a_loss_that_is_not_finite(experiment, tmp_path, capfd):
    flags = ["--optimizer.learning-rate", "1e30", "--train.steps", "4"]
    run_dir = Path(tmp_path / "run")
    assert main(["train", str(experiment), "--run-dir", str(run_dir), *flags]) == 1
    *_, last = capfd.readouterr().err.splitlines()
    assert last.startswith("jax-extractor: the loss is ") and "nothing was saved yet" in last
