"""What `train` is told: an experiment, a Python file, and the overrides of its fields."""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jax_extractor.errors import InputError, UsageError
from jax_extractor.training import Config


@dataclass(frozen=True)
class Arguments:
    """Trains EXPERIMENT, a Python file with get_config(); every field of it can be overridden.

    The same command again goes on from the last checkpoint.
    """

    config: Annotated[Config, tyro.conf.arg(name="")]
    run_dir: Path
    """Where the run lives: configuration, tokens, checkpoints, metrics."""


def load_experiment(path: Path) -> Config:
    """The configuration that the file's get_config() returns; InputError for whatever it raises."""
    spec = importlib.util.spec_from_file_location(f"experiment_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"experiment {path} is not a Python file: name one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        config = module.get_config()
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(
            f"experiment {path} failed: {type(error).__name__}: {error}: "
            "it must define get_config() returning a jax_extractor.training.Config"
        ) from error
    if not isinstance(config, Config):
        raise InputError(
            f"experiment {path}: get_config() returned {type(config).__name__}: return a "
            "jax_extractor.training.Config"
        )
    return config
