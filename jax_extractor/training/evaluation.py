"""Evaluation in nats per token, bits per byte and perplexity, weighted by real tokens."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jax_extractor.data import Batch, evaluation_batches, prepare
from jax_extractor.models import LanguageModel
from jax_extractor.shapes import Array, PyTree
from jax_extractor.training.run import check_same_text, open_run
from jax_extractor.training.step import summed_loss


class Evaluation(NamedTuple):
    """What a model makes of a text.

    loss is Σ nats / tokens, bits_per_byte Σ nats / (ln 2 · bytes), perplexity exp(loss).
    """

    loss: float
    bits_per_byte: float
    perplexity: float
    tokens: int
    bytes: int


EvaluationStep = Callable[[PyTree, Batch], tuple[Array, Array]]


def evaluation_step(model: LanguageModel) -> EvaluationStep:
    """(parameters, batch) -> (Σ nats, Σ tokens), compiled."""
    return jax.jit(lambda params, batch: summed_loss(model, params, batch))


def evaluate(
    step: EvaluationStep, params: PyTree, batches: Iterable[Batch], byte_lengths: np.ndarray
) -> Evaluation:
    """Sums the step over the batches; a ragged tail counts by its real tokens.

    byte_lengths (V,) is the number of bytes that each token stands for.
    """
    sums: list[tuple[Array, Array]] = []
    size = 0
    for batch in batches:
        sums.append(step(params, batch))
        size += int(byte_lengths[batch.targets][batch.weights > 0].sum())
    # Read once, at the end: until here the device never waits for the host.
    host = np.asarray(jax.device_get(sums), np.float64)
    nats, tokens = host.sum(axis=0)
    loss = float(nats / tokens)
    return Evaluation(
        loss=loss,
        bits_per_byte=float(nats / math.log(2) / size),
        perplexity=math.exp(min(loss, 700.0)),
        tokens=int(tokens),
        bytes=size,
    )


def evaluate_run(
    run_dir: Path, *, split: str = "validation", step: int | None = None, limit: int | None = None
) -> tuple[int, Evaluation]:
    """(step, evaluation) of a run's checkpoint on a whole split of its text.

    limit takes that many batches, evenly spaced. Raises what `open_run` raises, and InputError
    where the run's text is gone or another.
    """
    run = open_run(run_dir, step)
    length = run.config.model.max_length
    dataset = prepare(run.config.data, run.directory / "data", max_length=length)
    check_same_text(run.text, dataset)
    batches = evaluation_batches(
        dataset,
        batch_size=run.config.train.batch_size,
        length=length,
        split=split,
        limit=limit,
    )
    lengths = run.tokenizer.byte_lengths
    return run.step, evaluate(evaluation_step(run.model), run.params, batches, lengths)
