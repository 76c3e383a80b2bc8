"""jax-extractor bench training: one optimizer step of a language model, a row for each mixer.

The step is the one that `train` runs (forward, backward, clipping, AdamW, donated buffers), on one
device, with random tokens. All mixers have the same widths, so their parameter counts differ.
"""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np

from jax_extractor.bench.results import check_writable, write_json
from jax_extractor.bench.timing import Contestant, interleaved_medians
from jax_extractor.data import Batch
from jax_extractor.errors import UsageError
from jax_extractor.models import LanguageModel, ModelConfig
from jax_extractor.training.config import OptimizerConfig
from jax_extractor.training.optimizer import make_optimizer
from jax_extractor.training.sharding import batch_sharding, make_mesh, place
from jax_extractor.training.step import initial_state, jit_step, train_step


@dataclass(frozen=True)
class Options:
    """Sizes of the measurement, and where its results go."""

    mixers: tuple[str, ...] = ("mha", "ishe", "he", "talking_heads")
    """The rows; times are also given as a share of the first."""
    batch_size: int = 16
    """Sequences of a step."""
    accumulate: int = 1
    """Micro-batches that the step is cut into."""
    length: int = 256
    """Positions of a sequence, and an Extractor's offsets."""
    features: int = 128
    layers: int = 6
    ffn_features: int = 512
    num_heads: int = 8
    vocabulary: int = 256
    repeats: int = 5
    json: Path | None = None


@dataclass(frozen=True)
class Row:
    """One mixer's step."""

    mixer: str
    parameters: int
    milliseconds: float
    times_first: float
    tokens_per_second: float


def run(options: Options) -> None:
    """Measures all mixers in turns, prints the table, writes the file asked for."""
    for name, value in vars(options).items():
        if isinstance(value, int) and value < 1:
            raise UsageError(f"{name}={value}: choose at least 1")
    if options.batch_size % options.accumulate:
        raise UsageError(
            f"batch_size={options.batch_size} is not divisible by accumulate={options.accumulate}: "
            "choose a multiple"
        )
    if not options.mixers:
        raise UsageError("mixers is empty: choose at least one")
    check_writable(options.json)
    rows = measure(options)
    print(
        f"training step, float32, {jax.default_backend()}, jax {jax.__version__}: "
        f"{options.batch_size} sequences of {options.length} in {options.accumulate} micro-batches, "
        f"{options.layers} layers of "
        f"{options.features} features"
    )
    print(f"  {'':<14}{'parameters':>12}{'ms':>9}{'× ' + rows[0].mixer:>9}{'tokens/s':>11}")
    for row in rows:
        print(
            f"  {row.mixer:<14}{row.parameters:>12,}{row.milliseconds:>9.1f}"
            f"{row.times_first:>9.2f}{row.tokens_per_second:>11,.0f}"
        )
    content = {"options": asdict(options), "rows": [asdict(row) for row in rows]}
    write_json(options.json, content)


def measure(options: Options) -> list[Row]:
    """A row for each mixer; every step runs once before any runs again."""
    entered = {name: _contestant(name, options) for name in options.mixers}
    seconds = interleaved_medians([c for c, _ in entered.values()], options.repeats)
    first = seconds[options.mixers[0]]
    tokens = options.batch_size * options.length
    return [
        Row(name, parameters, seconds[name] * 1e3, seconds[name] / first, tokens / seconds[name])
        for name, (_, parameters) in entered.items()
    ]


def _contestant(name: str, options: Options) -> tuple[Contestant, int]:
    """A step ready to run again and again, and the model's number of parameters."""
    config = ModelConfig(
        mixer=name,
        features=options.features,
        num_layers=options.layers,
        num_heads=options.num_heads,
        max_length=options.length,
        ffn_features=options.ffn_features,
    )
    config.check()
    model = LanguageModel(config, options.vocabulary)
    optimizer, schedule = make_optimizer(OptimizerConfig(), 1000)
    mesh = make_mesh(devices=jax.devices()[:1])
    state = jax.jit(partial(initial_state, model, optimizer, 0))()
    step = jit_step(
        partial(
            train_step,
            model=model,
            optimizer=optimizer,
            schedule=schedule,
            accumulate=options.accumulate,
        ),
        mesh,
        state,
    )
    shape = (2, options.batch_size, options.length)
    inputs, targets = np.random.default_rng(0).integers(options.vocabulary, size=shape)
    batch = place(
        Batch(inputs.astype(np.int32), targets.astype(np.int32), np.ones(shape[1:], np.float32)),
        batch_sharding(mesh),
    )

    def call() -> None:
        nonlocal state
        state, _ = jax.block_until_ready(step(state, batch))

    return Contestant(name, call), sum(leaf.size for leaf in jax.tree.leaves(state.params))
