"""Progress: whole lines to a pipe, a bar on a terminal."""

import io
import time

import pytest

from jax_extractor.training.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands until it is told to go on."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    return wait


def test_plain_lines(clock):
    stream = io.StringIO()
    with Progress(1000, 0, stream) as progress:
        clock(9.0)
        progress.update(100, {"loss": 2.31, "tokens_per_second": 12345.6})
        clock(8.0)
        progress.update(200, {"loss": 2.2, "val_loss": 2.25, "tokens_per_second": 999.6})
        progress.line("saved")
    assert stream.getvalue().splitlines() == [
        "step 100/1000  loss 2.310  12.3k tokens/s  1m21s left",
        "step 200/1000  loss 2.200  val_loss 2.250  1000 tokens/s  1m04s left",
        "saved",
    ]


def test_time_left_counts_from_where_the_run_resumed(clock):
    stream = io.StringIO()
    with Progress(10_000, 1000, stream) as progress:
        progress.update(1000, {})
        clock(3600.0)
        progress.update(2000, {"loss": float("nan")})
        clock(1.0)
        progress.update(10_000, {})
    first, second, third = stream.getvalue().splitlines()
    assert first == "step 1000/10000"
    assert second == "step 2000/10000  loss nan  8h00m left"
    assert third == "step 10000/10000  0s left"


def test_large_speeds():
    stream = io.StringIO()
    with Progress(10, 10, stream) as progress:
        for speed in (0.0, 1e3, 2.34e6, 5.6e9):
            progress.update(10, {"tokens_per_second": speed})
    speeds = [line.split()[2] for line in stream.getvalue().splitlines()]
    assert speeds == ["0", "1.0k", "2.3M", "5.6G"]


def test_bar_on_a_terminal(clock):
    stream = Terminal()
    with Progress(1000, 0, stream) as progress:
        clock(10.0)
        progress.update(250, {"loss": 2.31, "tokens_per_second": 12345.6})
        progress.line("saved")
        clock(10.0)
        progress.update(500, {"loss": 2.2})
    shown = [part.strip() for part in stream.getvalue().replace("\n", "\r").split("\r")]
    assert "saved" in shown
    (quarter,) = {part for part in shown if "step 250/" in part}
    assert quarter.startswith("25%|")
    assert quarter.endswith("| step 250/1000, loss 2.310  12.3k tokens/s  30s left")
    assert shown[-2].endswith("| step 500/1000, loss 2.200  20s left")
    assert stream.getvalue().endswith("\n")


def test_standard_error_by_default(capsys):
    with Progress(10) as progress:
        progress.update(5, {"loss": 1.0})
    captured = capsys.readouterr()
    assert captured.err.startswith("step 5/10  loss 1.000")
    assert "\r" not in captured.err and captured.err.endswith("\n")
    assert captured.out == ""
