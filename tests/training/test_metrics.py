"""Metrics: every step once, every float exact, every line JSON."""

import json
import math
import resource
import struct
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from jax_extractor.errors import InputError
from jax_extractor.training.metrics import MetricsWriter, read_metrics


def lines(run):
    return (run / "metrics.jsonl").read_text().splitlines()


def events(run):
    """The events of each file, in the order in which the files were begun."""
    files = []
    for path in sorted((run / "tensorboard").iterdir()):
        data, found = path.read_bytes(), []
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            found.append(Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
        files.append(found)
    return files


def scalars(file):
    return [(e.step, v.tag, v.simple_value) for e in file for v in e.summary.value]


def write(run, steps, resume_step=None):
    with MetricsWriter(run, resume_step) as metrics:
        for step in steps:
            metrics.write(step, {"loss": 1.0 / step})


def test_rows_and_scalars(tmp_path):
    run = tmp_path / "new" / "run"
    with MetricsWriter(run, None) as metrics:
        metrics.write(10, {"loss": 2.5, "tokens": 4096})
        assert lines(run) == [
            '{"step": 10, "loss": 2.5, "tokens": 4096}'
        ]  # at once, before closing
        metrics.write(10, {"val_loss": np.float32(0.1)})
        assert len(scalars(events(run)[0])) == 3
    assert read_metrics(run) == [
        {"step": 10, "loss": 2.5, "tokens": 4096},
        {"step": 10, "val_loss": float(np.float32(0.1))},
    ]
    (file,) = events(run)
    assert file[0].file_version == "brain.Event:2"
    expected = [(10, "loss", 2.5), (10, "tokens", 4096), (10, "val_loss", float(np.float32(0.1)))]
    assert scalars(file) == expected


def test_floats_are_exact(tmp_path):
    values = np.random.default_rng(0).standard_normal(200) * 10.0 ** np.arange(-100, 100)
    with MetricsWriter(tmp_path, None) as metrics:
        for step, value in enumerate(values):
            metrics.write(step, {"loss": value})
    assert [row["loss"] for row in read_metrics(tmp_path)] == values.tolist()


def test_values_that_are_not_finite(tmp_path):
    with MetricsWriter(tmp_path, None) as metrics:
        metrics.write(1, {"loss": math.nan, "grad_norm": math.inf})
    assert lines(tmp_path) == ['{"step": 1, "loss": null, "grad_norm": null}']
    (row,) = read_metrics(tmp_path)
    assert math.isnan(row["loss"]) and math.isnan(row["grad_norm"])
    assert scalars(events(tmp_path)[0])[1] == (1, "grad_norm", math.inf)


@pytest.mark.parametrize("tail", ["", '{"step": 31, "lo', '{"step": 31, "loss": 1.0}'])
def test_resuming_measures_each_step_once(tmp_path, tail):
    write(tmp_path, (10, 20, 30))
    before = lines(tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(tail)
    assert [row["step"] for row in read_metrics(tmp_path)] == [10, 20, 30]
    write(tmp_path, (30, 40), resume_step=20)
    assert lines(tmp_path)[:3] == before
    assert [row["step"] for row in read_metrics(tmp_path)] == [10, 20, 30, 40]
    _, second = events(tmp_path)
    assert (second[1].step, second[1].session_log.status) == (21, SessionLog.START)


def test_starting_anew_cuts_every_row(tmp_path):
    write(tmp_path, (10, 20))
    write(tmp_path, (10,))
    assert [row["step"] for row in read_metrics(tmp_path)] == [10]
    first, second = events(tmp_path)
    assert not any(e.HasField("session_log") for e in first)
    assert (second[1].step, second[1].session_log.status) == (0, SessionLog.START)


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from jax_extractor.training.metrics import MetricsWriter

    metrics = MetricsWriter(Path(sys.argv[1]), None)
    for step in range(1, 101):
        metrics.write(step, {"loss": 1.0 / step})
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_killed_process_leaves_every_row(tmp_path):
    child = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), tmp_path])
    assert child.returncode == -9
    rows = [{"step": s, "loss": 1.0 / s} for s in range(1, 101)]
    assert read_metrics(tmp_path) == rows
    assert [step for step, _, _ in scalars(events(tmp_path)[0])] == list(range(1, 101))


@pytest.mark.parametrize("limited", ["metrics.jsonl", "tensorboard"])
def test_full_disk_leaves_no_half_row(tmp_path, limited):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsWriter(tmp_path, None) as metrics:
        metrics.write(1, {"loss": 1.0})
        (board,) = (tmp_path / "tensorboard").iterdir()
        size = (tmp_path / limited if limited != "tensorboard" else board).stat().st_size
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
            with pytest.raises(InputError) as error:
                metrics.write(2, {"loss": 0.5})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(error.value).startswith(f"cannot write {tmp_path}/metrics.jsonl: ")
    assert str(error.value).endswith("; free some space and run the same command again")
    assert lines(tmp_path) == ['{"step": 1, "loss": 1.0}']


def test_files_in_the_way(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=f"^cannot write {tmp_path}/file: .*another --run-dir$"):
        MetricsWriter(tmp_path / "file", None)
    (tmp_path / "tensorboard").write_text("")
    with pytest.raises(InputError, match=f"^cannot write {tmp_path}: "):
        MetricsWriter(tmp_path, None)


def test_reading_what_is_not_there(tmp_path):
    with pytest.raises(InputError, match=f"^{tmp_path} has no metrics.jsonl: train it first with"):
        read_metrics(tmp_path)
    with pytest.raises(InputError, match="none is no run directory: train it first with"):
        read_metrics(tmp_path / "none")


@pytest.mark.parametrize(
    "line",
    [
        "text",
        "[1]",
        '{"loss": 1.0}',
        '{"step": "1"}',
        "1",
        "",
        '{"step": 1, "loss": "x"}',
        '{"step": 1, "val_loss": [2.0]}',
    ],
)
def test_a_line_that_is_no_row(tmp_path, line):
    row = json.dumps({"step": 1, "loss": 1.0})
    (tmp_path / "metrics.jsonl").write_text(f"{row}\n{line}\n{row}\n")
    with pytest.raises(InputError, match=r"metrics\.jsonl line 2 is not a row of metrics: remove"):
        read_metrics(tmp_path)
    with pytest.raises(InputError, match="line 2 is not a row"):
        MetricsWriter(tmp_path, 1)
