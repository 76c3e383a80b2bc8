"""The measurements of a run: one JSON row a logged step, and the same scalars for TensorBoard."""

import contextlib
import errno
import json
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsFloat

from tensorboardX import RecordWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from jax_extractor.errors import InputError
from jax_extractor.files import cannot_write, write_atomic

FILE = "metrics.jsonl"


class MetricsWriter:
    """Writes `RUN/metrics.jsonl` and `RUN/tensorboard/`; a context manager.

    Both are written in the caller's thread, so that a full disk is told where it is met.

    Args:
        run_dir: the run's folder, made if need be.
        resume_step: the step of the checkpoint that training goes on from; None for a new start.
            Rows of later steps, which will be measured again, are cut, as is a last line that a
            killed process left half-written. TensorBoard hides its own later steps likewise.

    Raises:
        InputError: the folder cannot be written, or its metrics.jsonl is not what was written here.
    """

    def __init__(self, run_dir: Path, resume_step: int | None):
        self._path = run_dir / FILE
        self._file = -1
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            resumed = self._path.exists()
            if resumed:
                _cut(self._path, -1 if resume_step is None else resume_step)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            purge = (0 if resume_step is None else resume_step + 1) if resumed else None
            self._board = _Board(run_dir / "tensorboard", purge)
        except OSError as error:
            self._close_file()
            raise cannot_write(run_dir, error) from error

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def write(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        """Appends the row `{"step": step, NAME: VALUE, …}`; a value that is not finite reads null.

        Floats are written so that reading gives the same float64 again.

        Raises:
            InputError: the disk is full or cannot be written; no half row is left behind.
        """
        scalars = {n: v if isinstance(v, int) else float(v) for n, v in values.items()}
        row = {"step": step} | {n: v if math.isfinite(v) else None for n, v in scalars.items()}
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        size = os.fstat(self._file).st_size
        try:
            if os.write(self._file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._board.write(step, scalars)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, size)
            raise cannot_write(self._path, error) from error

    def close(self) -> None:
        """Closes both files; every row is on its way to the disk already."""
        self._close_file()
        self._board.close()

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_metrics(run_dir: Path) -> list[dict[str, int | float]]:
    """The rows of a run in the order they were written; null reads as NaN.

    A last line without its end, as a killed process leaves it, is passed over.

    Raises:
        InputError: the run has no metrics.jsonl, or a line of it is no JSON object with a step.
    """
    try:
        rows = _rows(run_dir / FILE)
    except OSError as error:
        what = f"has no {FILE}" if run_dir.is_dir() else "is no run directory"
        raise InputError(
            f"{run_dir} {what}: train it first with "
            f"`jax-extractor train EXPERIMENT --run-dir {run_dir}`"
        ) from error
    return [{n: math.nan if v is None else v for n, v in row.items()} for _, row in rows]


def _rows(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Each whole line with what it says."""
    rows = []
    *lines, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            row["step"] + 0
            if not all(value is None or isinstance(value, int | float) for value in row.values()):
                raise TypeError(row)
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"{path} line {number} is not a row of metrics: remove that line"
            ) from error
        rows.append((line, row))
    return rows


def _cut(path: Path, last_step: int) -> None:
    kept = "".join(f"{line}\n" for line, row in _rows(path) if row["step"] <= last_step)
    if kept.encode() != path.read_bytes():
        write_atomic(path, kept)


class _Board:
    """A TensorBoard event file written at once.

    tensorboardX's own SummaryWriter writes in a thread; when the disk is full that thread dies and
    the caller waits for it for ever.
    """

    def __init__(self, folder: Path, purge_step: int | None):
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns():020d}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter(str(folder / name))
        self._event(step=0, file_version="brain.Event:2")
        if purge_step is not None:
            self._event(step=purge_step, session_log=SessionLog(status=SessionLog.START))
        self._flush()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=v) for name, v in scalars.items()]
        self._event(step=step, summary=Summary(value=values))
        self._flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # told already, when it was written
            self._records.close()

    def _event(self, **fields) -> None:
        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())

    def _flush(self) -> None:
        try:
            self._records.flush()
        except OSError:
            self.close()
            raise
