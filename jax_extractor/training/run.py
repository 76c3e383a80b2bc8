"""A run directory: what is in it, and how it is opened again.

config.json       the configuration
tokenizer.json    how text becomes token ids
data/             memory-mapped tokens
checkpoints/N/    the state after step N
metrics.jsonl     one row a logged step; tensorboard/ holds the same
"""

import json
from dataclasses import dataclass
from pathlib import Path

import jax

from jax_extractor.data import Tokenizer, load_tokenizer
from jax_extractor.errors import InputError
from jax_extractor.models import LanguageModel
from jax_extractor.shapes import PyTree
from jax_extractor.training.checkpoints import Checkpoints
from jax_extractor.training.config import Config, differences, from_dict, to_dict
from jax_extractor.training.files import cannot_write, write_atomic
from jax_extractor.training.optimizer import make_optimizer
from jax_extractor.training.step import initial_state


@dataclass(frozen=True)
class Run:
    """A trained model: apply it as `run.model.apply({"params": run.params}, tokens)`."""

    directory: Path
    config: Config
    tokenizer: Tokenizer
    model: LanguageModel
    params: PyTree
    step: int


def claim(directory: Path, config: Config) -> None:
    """Makes the directory this configuration's own; InputError where another one has it."""
    path = directory / "config.json"
    if directory.exists() and not directory.is_dir():
        raise InputError(f"--run-dir {directory} is a file: name a directory")
    if path.exists():
        differing = differences(_read_config(path), to_dict(config))
        if differing:
            raise InputError(
                f"--run-dir {directory} holds a run of another configuration "
                f"({'; '.join(differing)}): choose another directory, or the same fields"
            )
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(directory, error) from error
    write_atomic(path, json.dumps(to_dict(config), indent=2) + "\n")


def _read_config(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}): restore it or train anew") from error


def open_run(directory: Path, step: int | None = None) -> Run:
    """The model of a run directory, at its latest checkpoint or at that of `step`.

    Raises InputError where there is no run, no checkpoint, or a damaged one.
    """
    directory = Path(directory)
    path = directory / "config.json"
    if not path.exists():
        raise InputError(
            f"{directory} is not a run directory (no config.json): "
            "train one with jax-extractor train EXPERIMENT --run-dir DIR"
        )
    config = from_dict(Config, _read_config(path))
    with Checkpoints(directory / "checkpoints") as checkpoints:
        step = checkpoints.metadata(step)["step"]
        tokenizer = load_tokenizer(directory / "tokenizer.json")
        model = LanguageModel(config.model, tokenizer.vocab_size)
        optimizer, _ = make_optimizer(config.optimizer, config.train.steps)
        abstract = jax.eval_shape(lambda: initial_state(model, optimizer, config.train.seed))
        params = checkpoints.restore_subtree(step, abstract.params, "params")
    return Run(directory, config, tokenizer, model, params, step)
