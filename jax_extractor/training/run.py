"""A run directory: what is in it, and how it is opened again.

config.json       the configuration
tokenizer.json    how text becomes token ids
data/             memory-mapped tokens
checkpoints/N/    the state after step N
metrics.jsonl     one row a logged step; tensorboard/ holds the same
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import jax

from jax_extractor.data import Dataset, Tokenizer, load_tokenizer
from jax_extractor.errors import InputError
from jax_extractor.files import cannot_write, write_atomic
from jax_extractor.models import LanguageModel
from jax_extractor.shapes import PyTree
from jax_extractor.training.checkpoints import Checkpoints
from jax_extractor.training.config import Config, differences, from_dict, to_dict
from jax_extractor.training.optimizer import make_optimizer
from jax_extractor.training.step import initial_state

try:
    import fcntl
except ImportError:  # not a Unix: two processes are not told apart there
    fcntl = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Run:
    """A trained model: apply it as `run.model.apply({"params": run.params}, tokens)`."""

    directory: Path
    config: Config
    tokenizer: Tokenizer
    model: LanguageModel
    params: PyTree
    step: int
    text: str
    """The fingerprint of the text it was trained on."""


@contextlib.contextmanager
def sole_trainer(directory: Path, config: Config) -> Iterator[None]:
    """Holds the directory, made if need be, for one process to train this configuration in it.

    The system lets go of it when the process ends, however it ends. Raises InputError where another
    configuration or another process has it, or where it cannot be written.
    """
    _check_claim(directory, config)
    with contextlib.ExitStack() as stack:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(directory / ".lock", "ab"))
        except OSError as error:
            raise cannot_write(directory, error) from error
        if not _lock_at_once(lock):
            raise InputError(
                f"--run-dir {directory} is being trained by another process: "
                "wait for its end, or choose another directory"
            )
        yield


def _lock_at_once(file: IO) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: two processes are not told apart there
        pass
    return True


def describe(directory: Path, config: Config, tokenizer: Tokenizer) -> None:
    """Writes what is needed to open the run again, besides its checkpoints."""
    tokenizer.save(directory / "tokenizer.json")
    write_atomic(directory / "config.json", json.dumps(to_dict(config), indent=2) + "\n")


def check_same_text(text: str, dataset: Dataset) -> None:
    """InputError where the dataset is not the one with that fingerprint."""
    if text != dataset.fingerprint:
        raise InputError(
            "the text in data.files (or the running Python's, for data.source=stdlib) is not the "
            "one that this run was trained on: restore it, or train anew in another --run-dir"
        )


def _check_claim(directory: Path, config: Config) -> None:
    path = directory / "config.json"
    if directory.exists() and not directory.is_dir():
        raise InputError(f"--run-dir {directory} is a file: name a directory")
    if not path.exists() and _has_checkpoints(directory):
        raise InputError(
            f"--run-dir {directory} has checkpoints but no config.json: restore it, or choose "
            "another --run-dir"
        )
    if path.exists() and _has_begun(directory):
        differing = differences(read_config(directory), to_dict(config))
        if differing:
            raise InputError(
                f"--run-dir {directory} holds a run of another configuration "
                f"({'; '.join(differing)}): choose another directory, or the same fields"
            )


def _has_checkpoints(directory: Path) -> bool:
    folder = directory / "checkpoints"
    return folder.is_dir() and any(path.name.isdigit() for path in folder.iterdir())


def _has_begun(directory: Path) -> bool:
    """Whether anything was trained there that another configuration would take from its owner."""
    rows = directory / "metrics.jsonl"
    return (directory / "checkpoints").exists() or (rows.exists() and rows.stat().st_size > 0)


def read_config(directory: Path) -> dict:
    """The stored configuration of a run; InputError where there is no run or it is damaged."""
    path = directory / "config.json"
    if not path.exists():
        raise InputError(
            f"{directory} is not a run directory (no config.json): "
            "train one with jax-extractor train EXPERIMENT --run-dir DIR"
        )
    try:
        values = json.loads(path.read_text())
        if not isinstance(values, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}): restore it or train anew") from error
    return values


def _stored_config(directory: Path) -> Config:
    """The checked configuration of a run; InputError naming the file where it does not fit."""
    values = read_config(directory)
    try:
        config = from_dict(Config, values)
        config.check()
    except InputError as error:
        path = directory / "config.json"
        raise InputError(f"{path}: {error}: restore it or train anew") from error
    return config


def open_run(directory: Path, step: int | None = None) -> Run:
    """The model of a run directory, at its latest checkpoint or at that of `step`.

    Raises InputError where there is no run, no checkpoint, or a damaged one.
    """
    directory = Path(directory)
    config = _stored_config(directory)
    with Checkpoints(directory / "checkpoints") as checkpoints:
        saved = checkpoints.metadata(step)
        step = saved["step"]
        tokenizer = load_tokenizer(directory / "tokenizer.json")
        model = LanguageModel(config.model, tokenizer.vocab_size)
        optimizer, _ = make_optimizer(config.optimizer, config.train.steps)
        abstract = jax.eval_shape(lambda: initial_state(model, optimizer, config.train.seed))
        params = checkpoints.restore_subtree(step, abstract.params, "params")
    return Run(directory, config, tokenizer, model, params, saved["step"], saved["text"])
