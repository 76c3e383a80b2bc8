"""Evaluation against the definitions, computed by hand in numpy."""

import dataclasses
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_extractor.data import DataConfig, evaluation_batches, prepare
from jax_extractor.errors import InputError
from jax_extractor.models import LanguageModel, ModelConfig
from jax_extractor.training import evaluate, evaluation_step, open_run
from jax_extractor.training.evaluation import evaluate_run

pytestmark = pytest.mark.usefixtures("one_device")
TEXT = "A line of words, the next one after it; déjà vu? 1, 2, 3.\n" * 60


def by_hand(model, params, tokens, byte_lengths, length):
    """(loss, bits per byte, tokens, bytes): window by window, token by token."""
    apply = jax.jit(lambda inputs: model.apply({"params": params}, inputs))
    nats, count, size = 0.0, 0, 0
    for start in range(0, len(tokens) - 1, length):
        window = np.asarray(tokens[start : start + length + 1], np.int32)
        inputs, targets = window[:-1], window[1:]
        padded = np.zeros((1, length), np.int32)  # causal: what follows changes nothing
        padded[0, : len(inputs)] = inputs
        logits = np.float64(apply(jnp.asarray(padded))[0])
        for row, target in zip(logits, targets, strict=False):
            nats += np.log(np.exp(row - row.max()).sum()) + row.max() - row[target]
            count += 1
            size += int(byte_lengths[target])
    return nats / count, nats / (math.log(2) * size), count, size


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_against_a_loop_by_hand(tokenizer, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    data = DataConfig(
        source="files",
        files=(str(tmp_path / "text.txt"),),
        tokenizer=tokenizer,
        vocab_size=290,
        validation_fraction=0.1,
    )
    dataset = prepare(data, tmp_path / "data")
    config = ModelConfig(features=16, num_layers=1, max_length=7, ffn_features=16)
    model = LanguageModel(config, dataset.vocab_size)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 7), jnp.int32))["params"]
    found = evaluate(
        evaluation_step(model),
        params,
        evaluation_batches(dataset, batch_size=4, length=7),
        dataset.tokenizer.byte_lengths,
    )
    lengths = dataset.tokenizer.byte_lengths
    loss, bits, tokens, size = by_hand(model, params, dataset.validation, lengths, 7)
    assert (found.tokens, found.bytes) == (tokens, size)
    assert tokens == len(dataset.validation) - 1 and tokens % 28 != 0  # a ragged tail
    if tokenizer == "bytes":
        assert size == tokens
    else:
        assert size > 1.2 * tokens
        assert size == dataset.validation_bytes - lengths[dataset.validation[0]]
    np.testing.assert_allclose(found.loss, loss, rtol=1e-6)
    np.testing.assert_allclose(found.bits_per_byte, bits, rtol=1e-6)
    np.testing.assert_allclose(found.perplexity, math.exp(loss), rtol=1e-5)


def test_a_run(trained):
    run = open_run(trained)
    dataset = prepare(run.config.data, trained / "data")
    for split in ("validation", "train"):
        step, found = evaluate_run(trained, split=split)
        expected = by_hand(
            run.model, run.params, dataset.split(split), run.tokenizer.byte_lengths, 8
        )
        assert (step, found.tokens) == (12, expected[2])
        np.testing.assert_allclose((found.loss, found.bits_per_byte), expected[:2], rtol=1e-6)


def test_part_of_a_split_and_an_earlier_step(trained):
    step, part = evaluate_run(trained, limit=1)
    assert (step, part.tokens) == (12, 64)
    step, early = evaluate_run(trained, step=8)
    assert step == 8
    assert early.loss > evaluate_run(trained)[1].loss


def test_a_uniform_model_needs_eight_bits_per_byte(trained):
    run = open_run(trained)
    zeros = jax.tree.map(jnp.zeros_like, run.params)
    dataset = prepare(run.config.data, trained / "data")
    batches = evaluation_batches(dataset, batch_size=8, length=8)
    found = evaluate(evaluation_step(run.model), zeros, batches, run.tokenizer.byte_lengths)
    np.testing.assert_allclose(found, (math.log(256), 8, 256, found.tokens, found.bytes), rtol=1e-6)


def test_another_text_is_refused(trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    config = open_run(run).config
    other = tmp_path / "other.txt"
    other.write_text("quite another text, " * 100)
    text = (run / "config.json").read_text().replace(config.data.files[0], str(other))
    (run / "config.json").write_text(text)
    with pytest.raises(InputError, match="is not the one that this run was trained on"):
        evaluate_run(run)
    other.unlink()
    with pytest.raises(InputError, match=r"cannot read .*other\.txt"):
        evaluate_run(run)


def test_a_hopeless_loss_has_a_finite_perplexity(trained):
    run = open_run(trained)
    dataset = prepare(dataclasses.replace(run.config.data), trained / "data")
    batches = evaluation_batches(dataset, batch_size=8, length=8, limit=1)

    def step(params, batch):
        return jnp.float32(1e6 * batch.weights.sum()), jnp.float32(batch.weights.sum())

    found = evaluate(step, run.params, batches, run.tokenizer.byte_lengths)
    assert found.loss == 1e6 and math.isfinite(found.perplexity)
