"""jax-extractor train EXPERIMENT --run-dir DIR [--model.mixer NAME …]"""

import itertools
import sys
from pathlib import Path

from jax_extractor.errors import InputError, UsageError


def run(arguments: list[str]) -> None:
    """Reads the experiment, applies the overrides, trains."""
    wants_help = arguments[:1] in (["-h"], ["--help"])
    if not wants_help:
        path = _experiment(arguments)
    # Only now, so that a wrong path is told at once: these bring jax, which takes seconds.
    from jax_extractor.cli.arguments import parse
    from jax_extractor.cli.experiment import Arguments, load_experiment
    from jax_extractor.training import train

    if wants_help:
        parse(Arguments, ["--help"], prog="train EXPERIMENT")
    default = Arguments(load_experiment(path), Path("runs") / path.stem)
    chosen = parse(Arguments, arguments[1:], prog=f"train {path}", default=default)
    train(chosen.config, chosen.run_dir)
    print(f"trained: jax-extractor generate {chosen.run_dir} --prompt TEXT", file=sys.stderr)


def _experiment(arguments: list[str]) -> Path:
    if not arguments or arguments[0].startswith("-"):
        raise UsageError(
            "train needs an experiment first: jax-extractor train experiments/demo.py --run-dir DIR"
        )
    if "--run-dir=" in arguments or ("--run-dir", "") in itertools.pairwise(arguments):
        raise UsageError("--run-dir '' is empty: name a directory, such as runs/demo")
    path = Path(arguments[0])
    if not path.is_file():
        raise InputError(f"experiment {path} is not a file: name one, such as experiments/demo.py")
    return path
