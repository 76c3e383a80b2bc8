"""The loop: rows, checkpoints, and what is left when a run is stopped, killed or refused."""

import dataclasses
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

from jax_extractor.data import prepare
from jax_extractor.errors import InputError, UsageError
from jax_extractor.models import LanguageModel
from jax_extractor.training import Interrupted, loop, read_metrics, train
from jax_extractor.training.checkpoints import Checkpoints
from jax_extractor.training.config import to_dict
from jax_extractor.training.metrics import MetricsWriter
from jax_extractor.training.placement import Placement
from jax_extractor.training.progress import Progress
from jax_extractor.training.run import sole_trainer

pytestmark = pytest.mark.usefixtures("one_device")


def changed(config, part, **fields):
    new = dataclasses.replace(getattr(config, part), **fields)
    return dataclasses.replace(config, **{part: new})


def numbers(run_dir):
    """The rows without the speed, which no two runs share."""
    rows = read_metrics(run_dir)
    return [{n: v for n, v in row.items() if n != "tokens_per_second"} for row in rows]


def saved_steps(run_dir):
    folder = run_dir / "checkpoints"
    return sorted(int(p.name) for p in folder.iterdir()) if folder.exists() else []


def contents(folder):
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def test_rows_and_checkpoints(trained):
    rows = read_metrics(trained)
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10, 12]
    for row in rows:
        always = {"step", "loss", "grad_norm", "learning_rate", "tokens_per_second"}
        looks = {"val_loss", "val_bits_per_byte", "val_perplexity"}
        assert set(row) == (always | looks if row["step"] in (6, 12) else always)
    assert json.loads((trained / "metrics.jsonl").read_text().splitlines()[0])["step"] == 2
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3
    assert abs(rows[0]["loss"] - np.log(256)) < 1.5
    assert rows[-1]["val_loss"] < rows[2]["val_loss"]
    assert saved_steps(trained) == [8, 12]


def test_again_after_the_end_changes_nothing(trained, tiny, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    before = contents(tmp_path / "run")
    state = train(tiny, tmp_path / "run")
    assert int(state.step) == 12
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize(
    "row, number, stop",
    [
        (2, signal.SIGINT, 3),  # while step 3 runs on the device
        (4, signal.SIGTERM, 5),  # in the middle of saving step 4
        (6, signal.SIGINT, 6),  # in the middle of the look at step 6
    ],
)
def test_a_signal_saves_and_the_run_goes_on(
    row, number, stop, trained, tiny, tmp_path, monkeypatch, capfd
):
    write = MetricsWriter.write

    def write_and_signal(self, step, values):
        write(self, step, values)
        if step == row:
            signal.raise_signal(number)

    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        patch.setattr(MetricsWriter, "write", write_and_signal)
        told = f"stopped at step {stop} of 12 and saved: run the same command again to go on"
        with pytest.raises(Interrupted, match=told):
            train(tiny, tmp_path)
    assert handlers == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    assert max(saved_steps(tmp_path)) == stop
    assert numbers(tmp_path) == numbers(trained)[: stop // 2]
    train(tiny, tmp_path)
    assert f"going on from step {stop} of 12" in capfd.readouterr().err
    assert numbers(tmp_path) == numbers(trained)


def test_a_second_interrupt_does_not_wait():
    with loop.StopSignal() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_killed_at_any_moment_each_step_once(tiny, tmp_path, compiled_directory):
    """The front door in a process of its own, killed twice, interrupted once, then finished."""
    config = changed(tiny, "train", steps=60, log_every=1, eval_every=20, checkpoint_every=2)
    train(config, tmp_path / "whole")
    expected = numbers(tmp_path / "whole")
    assert [row["step"] for row in expected] == list(range(1, 61))

    experiment = tmp_path / "experiment.py"
    experiment.write_text(
        "from jax_extractor.training.config import Config, from_dict\n"
        f"def get_config():\n    return from_dict(Config, {to_dict(config)!r})\n"
    )
    run_dir = tmp_path / "run"
    environment = os.environ | {
        "XLA_FLAGS": "",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(compiled_directory),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def start_and_send(number, at_row):
        """(exit status, standard error) of a run that gets the signal soon after its row."""
        command = [sys.executable, "-m", "jax_extractor", "train", str(experiment)]
        child = subprocess.Popen(
            [*command, "--run-dir", str(run_dir)],
            env=environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        rows = run_dir / "metrics.jsonl"
        while child.poll() is None and f'"step": {at_row},' not in (
            rows.read_text() if rows.exists() else ""
        ):
            time.sleep(0.002)
        time.sleep(random.Random(at_row).uniform(0, 0.02))
        child.send_signal(number)
        out, err = child.communicate()
        assert out == ""
        return child.returncode, err

    for at_row in (3, 18):
        status, _ = start_and_send(signal.SIGKILL, at_row)
        assert status == -signal.SIGKILL
        assert len(numbers(run_dir)) < 60
    status, err = start_and_send(signal.SIGINT, 33)
    assert status == 1
    assert re.fullmatch(
        r"jax-extractor: stopped at step \d+ of 60 and saved: run the same command again to go on",
        err.splitlines()[-1],
    )
    assert err.count("jax-extractor:") == 1
    train(config, run_dir)
    assert numbers(run_dir) == expected


def test_another_configuration_is_refused(trained, tiny):
    before = contents(trained)
    other = changed(changed(tiny, "train", seed=1), "model", mixer="she")
    with pytest.raises(InputError) as caught:
        train(other, trained)
    assert not isinstance(caught.value, UsageError)
    assert "(model.mixer: ishe -> she; train.seed: 0 -> 1)" in str(caught.value)
    assert contents(trained) == before


def test_a_start_that_trained_nothing_leaves_the_directory_free(tiny, tmp_path, monkeypatch):
    """As when the memory is too small for the first step."""

    def too_large(self, state, start, stop):
        raise RuntimeError("Out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(loop.Steps, "run", too_large)
        with pytest.raises(RuntimeError, match="Out of memory"):
            train(changed(tiny, "model", features=64), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model"]["features"] == 64
    with pytest.raises(UsageError, match="model_devices=3"):  # not: another configuration
        train(changed(tiny, "train", model_devices=3), tmp_path)


def test_a_refused_start_leaves_the_directory_free(trained, tiny, tmp_path):
    for part, fields, told in [
        ("model", {"max_length": 10_000}, "too short"),
        ("data", {"files": (str(tmp_path / "none.txt"),)}, "none.txt"),
        ("optimizer", {"multipliers": (("head", 2.0),)}, "'head' is found in no parameter path"),
    ]:
        with pytest.raises(InputError, match=told):
            train(changed(tiny, part, **fields), tmp_path / "run")
    train(tiny, tmp_path / "run")
    assert numbers(tmp_path / "run") == numbers(trained)


def test_sizes_that_do_not_fit_are_told_before_the_text_is_read(tiny, tmp_path):
    for part, fields, told in [
        ("model", {"mixer": "mha", "num_heads": 3}, "num_heads=3"),
        ("model", {"mixer": "talking_heads", "num_heads": 32}, "key_heads=32 share features=16"),
        ("train", {"model_devices": 2}, "model_devices=2 does not divide"),
    ]:
        with pytest.raises(UsageError, match=told):
            train(changed(tiny, part, **fields), tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_a_run_is_trained_by_one_process(tiny, tmp_path):
    with (
        sole_trainer(tmp_path, tiny),
        pytest.raises(InputError, match="is being trained by another process"),
    ):
        train(tiny, tmp_path)


def test_another_text_is_refused_and_the_tokenizer_stays(tiny, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a first text, of a few words, again and again. " * 40)
    config = changed(tiny, "data", files=(str(text),), tokenizer="bpe", vocab_size=270)
    config = changed(config, "train", steps=2, eval_every=0)
    train(config, tmp_path / "run")
    before = (tmp_path / "run" / "tokenizer.json").read_bytes()
    text.write_text("quite another text with other pairs, hm, hm, hm. " * 40)
    with pytest.raises(InputError, match="is not the one that this run was trained on"):
        train(config, tmp_path / "run")
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == before


def test_a_full_disk_loses_nothing(trained, tiny, tmp_path):
    """No file may grow beyond 20 000 bytes: the first checkpoint fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(InputError, match=r"cannot write .*checkpoints: File too large; free"):
            train(tiny, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert numbers(tmp_path) == numbers(trained)[: len(numbers(tmp_path))]
    train(tiny, tmp_path)
    assert numbers(tmp_path) == numbers(trained)


@pytest.mark.parametrize("under", ["file", "file/run", "/proc/run"])
def test_no_place_for_a_run(under, tiny, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match=r"is a file|cannot write"):
        train(tiny, tmp_path / under)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_loss_that_is_not_finite_is_refused(tiny, tmp_path):
    config = changed(tiny, "optimizer", learning_rate=1e30)
    with pytest.raises(InputError) as caught:
        train(config, tmp_path)
    message = str(caught.value)
    assert re.search(r"the loss is (nan|inf), .* at step [24] \(nothing was saved yet\)", message)
    assert "lower optimizer.learning_rate=1e+30 in another --run-dir" in message
    assert saved_steps(tmp_path) == []
    assert all(np.isfinite(row["loss"]) for row in read_metrics(tmp_path))


# The loop alone, with a step that is told what to answer.


class Recorder(Checkpoints):
    """Checkpoints and metrics that write down what they are given."""

    def __init__(self, events):
        self.events = events

    def save(self, step, state, metadata, *, wait=False):
        self.events.append(f"save {step}")

    def latest(self):
        return max((int(e.split()[1]) for e in self.events if e.startswith("save")), default=None)


class Rows(MetricsWriter):
    def __init__(self, events):
        self.events = events

    def write(self, step, values):
        self.events.append(f"row {step}")


def scripted(config, folder, losses, grad_norms, monkeypatch):
    """(Steps, events) whose step answers with these numbers."""
    events: list[str] = []
    dataset = prepare(config.data, folder)

    def step(state, batch):
        n = len([e for e in events if e.startswith("step")])
        events.append(f"step {n + 1}")
        return state, {"loss": jnp.float32(losses[n]), "grad_norm": jnp.float32(grad_norms[n])}

    placement = Placement(
        like=None,
        create=lambda: None,
        spread=lambda state: state,
        gather=lambda state: state,
        place_batch=lambda batch: batch,
        step=step,
    )
    monkeypatch.setattr(loop.Steps, "look", lambda self, state, metrics: self.flush())
    model = LanguageModel(config.model, dataset.vocab_size)
    progress = Progress(config.train.steps)
    recorder, rows = Recorder(events), Rows(events)
    return loop.Steps(config, dataset, model, placement, recorder, rows, progress), events


STATE = loop.TrainState(jnp.int32(0), {}, (), jnp.zeros(2, jnp.uint32))


def test_a_row_is_read_when_the_next_step_is_on_its_way(tiny, tmp_path, monkeypatch):
    config = changed(tiny, "train", steps=7, log_every=2, eval_every=0, checkpoint_every=5)
    steps, events = scripted(config, tmp_path, [1.0] * 7, [1.0] * 7, monkeypatch)
    steps.run(STATE, 0, loop.StopSignal())
    assert " ".join(events) == (
        "step 1 step 2 step 3 row 2 step 4 step 5 row 4 save 5 step 6 step 7 row 6 row 7 save 7"
    )


@pytest.mark.parametrize("spoiled", ["loss", "grad_norm"])
def test_a_spoiled_state_is_never_saved(spoiled, tiny, tmp_path, monkeypatch):
    """A gradient that is not finite spoils the state one step before the loss shows it."""
    config = changed(tiny, "train", steps=9, log_every=9, eval_every=0, checkpoint_every=2)
    bad = [1.0, 1.0, 1.0, float("inf"), float("nan"), 1.0, 1.0, 1.0, 1.0]
    losses, norms = (bad, [1.0] * 9) if spoiled == "loss" else ([1.0] * 9, bad)
    steps, events = scripted(config, tmp_path, losses, norms, monkeypatch)
    with pytest.raises(InputError, match=r"at step 4 \(the checkpoint of step 2 is kept\): lower"):
        steps.run(STATE, 0, loop.StopSignal())
    assert [e for e in events if not e.startswith("step")] == ["save 2"]
