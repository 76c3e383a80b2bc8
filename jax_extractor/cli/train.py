"""jax-extractor train EXPERIMENT --run-dir DIR [--model.mixer NAME …]"""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jax_extractor.cli.arguments import parse
from jax_extractor.errors import InputError, UsageError
from jax_extractor.training import Config
from jax_extractor.training import train as train_config


@dataclass(frozen=True)
class Arguments:
    """Trains EXPERIMENT, a Python file with get_config(); every field of it can be overridden.

    The same command again goes on from the last checkpoint.
    """

    config: Annotated[Config, tyro.conf.arg(name="")]
    run_dir: Path
    """Where the run lives: configuration, tokens, checkpoints, metrics."""


def run(arguments: list[str]) -> None:
    """Reads the experiment, applies the overrides, trains."""
    if arguments[:1] in (["-h"], ["--help"]):
        parse(Arguments, ["--help"], prog="train EXPERIMENT")
    if not arguments or arguments[0].startswith("-"):
        raise UsageError(
            "train needs an experiment first: jax-extractor train experiments/demo.py --run-dir DIR"
        )
    path = Path(arguments[0])
    default = Arguments(load_experiment(path), Path("runs") / path.stem)
    chosen = parse(Arguments, arguments[1:], prog=f"train {path}", default=default)
    train_config(chosen.config, chosen.run_dir)
    print(f"trained: jax-extractor generate {chosen.run_dir} --prompt TEXT", file=sys.stderr)


def load_experiment(path: Path) -> Config:
    """The configuration that the file's get_config() returns."""
    if not path.is_file():
        raise InputError(f"experiment {path} is not a file: name one, such as experiments/demo.py")
    spec = importlib.util.spec_from_file_location(f"experiment_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"experiment {path} is not a Python file: name one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        config = module.get_config()
    except (SyntaxError, ImportError, AttributeError, NameError, TypeError) as error:
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
