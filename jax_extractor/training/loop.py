"""The training loop: one function that reads top to bottom."""

import math
import signal
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from jax_extractor.data import Dataset, evaluation_batches, prefetch, prepare, train_batch
from jax_extractor.errors import InputError
from jax_extractor.models import LanguageModel
from jax_extractor.shapes import Array
from jax_extractor.training.checkpoints import Checkpoints
from jax_extractor.training.config import Config
from jax_extractor.training.evaluation import evaluate, evaluation_step
from jax_extractor.training.metrics import MetricsWriter
from jax_extractor.training.optimizer import make_optimizer
from jax_extractor.training.placement import Placement, make_placement
from jax_extractor.training.progress import Progress
from jax_extractor.training.run import check_same_text, describe, sole_trainer
from jax_extractor.training.sharding import make_mesh
from jax_extractor.training.step import TrainState, initial_state, train_step


class Interrupted(InputError):
    """Training was stopped by Ctrl-C or SIGTERM; everything is saved."""


def train(config: Config, run_dir: Path) -> TrainState:
    """Trains the configuration in its run directory, from its latest checkpoint if it has one.

    Writes what `training.run` lists. The batch is a pure function of (seed, step), so a run that
    was killed and started again has the losses of one that was not, to the last bit (on the same
    devices). Returns the final state.

    Raises:
        UsageError: a field that does not fit.
        InputError: text, disk or run directory that does not work; a loss that is not finite.
        Interrupted: after Ctrl-C or SIGTERM, once the step at hand is done and saved.
    """
    config.check()
    _check_sizes(config)
    run_dir = Path(run_dir)
    with sole_trainer(run_dir, config):
        return _train(config, run_dir)


def _check_sizes(config: Config) -> None:
    """Refuses what the model or the mesh would refuse, before a long text is read for it."""
    make_mesh(config.train.model_devices)
    tokens = jax.ShapeDtypeStruct((1, config.model.max_length), jnp.int32)
    jax.eval_shape(LanguageModel(config.model, 2).init, jax.random.key(0), tokens)


def _train(config: Config, run_dir: Path) -> TrainState:
    dataset = prepare(config.data, run_dir / "data", max_length=config.model.max_length)
    model = LanguageModel(config.model, dataset.vocab_size)
    optimizer, schedule = make_optimizer(config.optimizer, config.train.steps)
    placement = make_placement(
        config.train,
        create=partial(initial_state, model, optimizer, config.train.seed),
        step=partial(
            train_step,
            model=model,
            optimizer=optimizer,
            schedule=schedule,
            accumulate=config.train.accumulate,
        ),
    )
    with Checkpoints(run_dir / "checkpoints", config.train.keep_checkpoints) as checkpoints:
        start = checkpoints.latest()
        if start is None:
            # From here on the directory is this configuration's: all that could be refused was not.
            describe(run_dir, config, dataset.tokenizer)
            state = placement.create()
        else:
            check_same_text(checkpoints.metadata(start)["text"], dataset)
            if not (run_dir / "tokenizer.json").exists():
                dataset.tokenizer.save(run_dir / "tokenizer.json")
            state = checkpoints.restore(start, placement.like)
            if start >= config.train.steps:
                return state
        with (
            MetricsWriter(run_dir, start) as writer,
            Progress(config.train.steps, start or 0) as progress,
            StopSignal() as stop,
        ):
            parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
            progress.line(
                f"{config.model.mixer}: {parameters:,} parameters, {len(dataset.train):,} training "
                f"tokens, {len(dataset.validation):,} for validation"
            )
            if start is not None:
                progress.line(f"going on from step {start} of {config.train.steps}")
            steps = Steps(config, dataset, model, placement, checkpoints, writer, progress)
            return steps.run(state, start or 0, stop)


class Steps:
    """The loop's parts held together: steps, rows of metrics, looks at validation, checkpoints."""

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        model: LanguageModel,
        placement: Placement,
        checkpoints: Checkpoints,
        writer: MetricsWriter,
        progress: Progress,
    ):
        self.config, self.dataset, self.placement = config, dataset, placement
        self.checkpoints, self.writer, self.progress = checkpoints, writer, progress
        self.evaluation_step = evaluation_step(model)
        self.pending: tuple[int, dict] | None = None
        self.clock = (0, time.perf_counter())

    def run(self, state: TrainState, start: int, stop: "StopSignal") -> TrainState:
        """Trains from step `start` to the last."""
        train = self.config.train
        batches = (
            train_batch(
                self.dataset,
                seed=train.seed,
                step=step,
                batch_size=train.batch_size,
                length=self.config.model.max_length,
            )
            for step in range(start, train.steps)
        )
        self.clock = (start, time.perf_counter())
        state = self.placement.spread(state)
        with prefetch(batches) as ahead:
            for step, batch in enumerate(ahead, start + 1):
                state, metrics = self.placement.step(state, self.placement.place_batch(batch))
                # Rows are read one step late: the device has its next step by then.
                self.flush()
                last = step == train.steps
                look = last or (train.eval_every and step % train.eval_every == 0)
                if step % train.log_every == 0 or look:
                    self.pending = (step, metrics)
                health = metrics["loss"], metrics["grad_norm"]
                if look:
                    self.look(state, metrics)
                stopping = stop.asked and not last  # read once: a signal may come at any moment
                if step % train.checkpoint_every == 0 or last or stopping:
                    self.save(step, state, health)
                if stopping:
                    self.checkpoints.wait()
                    raise Interrupted(
                        f"stopped at step {step} of {train.steps} and saved: "
                        "run the same command again to go on"
                    )
        return self.placement.gather(state)

    def flush(self) -> None:
        """Writes the row that is due, if one is; waits for its step to end."""
        if self.pending is None:
            return
        step, metrics = self.pending
        self.pending = None
        row = {name: float(first(metrics[name])) for name in ("loss", *metrics)}
        self._check_finite(step, row["loss"], row["grad_norm"])
        before, then = self.clock
        self.clock = (step, time.perf_counter())
        tokens = (step - before) * self.config.train.batch_size * self.config.model.max_length
        row["tokens_per_second"] = tokens / max(self.clock[1] - then, 1e-9)
        self.writer.write(step, row)
        self.progress.update(step, row)

    def look(self, state: TrainState, metrics: dict) -> None:
        """Adds the validation loss to the row that is due, and writes it."""
        train = self.config.train
        batches = evaluation_batches(
            self.dataset,
            batch_size=train.batch_size,
            length=self.config.model.max_length,
            limit=train.eval_batches,
        )
        params = self.placement.gather(state).params
        found = evaluate(self.evaluation_step, params, batches, self.dataset.tokenizer.byte_lengths)
        metrics["val_loss"] = found.loss
        metrics["val_bits_per_byte"] = found.bits_per_byte
        metrics["val_perplexity"] = found.perplexity
        self.flush()
        self.clock = (self.clock[0], time.perf_counter())

    def save(self, step: int, state: TrainState, health: tuple[Array, Array]) -> None:
        """Saves the state; rows up to here are written first, so that none is lost or doubled."""
        self.flush()
        self._check_finite(step, *(float(first(value)) for value in health))
        self.checkpoints.save(
            step, self.placement.gather(state), {"step": step, "text": self.dataset.fingerprint}
        )

    def _check_finite(self, step: int, loss: float, grad_norm: float) -> None:
        """A gradient that is not finite spoils the parameters while the loss still looks well."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return
        saved = self.checkpoints.latest()
        kept = (
            "nothing was saved yet" if saved is None else f"the checkpoint of step {saved} is kept"
        )
        raise InputError(
            f"the loss is {loss}, its gradient's norm {grad_norm} at step {step} ({kept}): lower "
            f"optimizer.learning_rate={self.config.optimizer.learning_rate} in another --run-dir"
        )


def first(value: Array | float) -> Array | float:
    """A metric of one device; under pmap every device has the same."""
    return value if isinstance(value, float) or not value.ndim else value[0]


class StopSignal:
    """Ctrl-C and SIGTERM ask for an end after the step at hand; a second Ctrl-C is not waited for."""

    def __init__(self):
        self.asked = False
        self._previous: dict = {}

    def __enter__(self) -> "StopSignal":
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._previous[number] = signal.signal(number, self._handle)
            except ValueError:  # not the main thread: signals are its caller's business
                break
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True
