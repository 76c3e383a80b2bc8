from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_extractor.errors import UsageError
from jax_extractor.generation import SamplingConfig, sample, sample_keys
from jax_extractor.generation.sampling import (
    keep_min_p,
    keep_top_k,
    keep_top_p,
    modify,
    penalize_repetition,
)

LOGITS = np.random.default_rng(0).normal(0, 2, (6, 40)).astype(np.float32)


def softmax(logits):
    e = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def kept(logits):
    return np.isfinite(np.asarray(logits))


@pytest.mark.parametrize("k", [1, 2, 17, 40, 1000])
def test_top_k_keeps_the_k_largest_unchanged(k):
    found = np.asarray(keep_top_k(jnp.asarray(LOGITS), k))
    rank = np.argsort(np.argsort(-LOGITS, axis=-1), axis=-1)
    np.testing.assert_array_equal(found, np.where(rank < k, LOGITS, -np.inf))


def test_top_k_keeps_ties():
    found = keep_top_k(jnp.asarray([[1.0, 3.0, 2.0, 2.0, 0.0]]), 2)
    assert kept(found).tolist() == [[False, True, True, True, False]]


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_smallest_set_that_reaches_p(p):
    found = np.asarray(keep_top_p(jnp.asarray(LOGITS), p))
    expected = np.full_like(LOGITS, -np.inf)
    for row, probability in enumerate(softmax(LOGITS)):
        total = 0.0
        for token in np.argsort(-probability):
            expected[row, token] = LOGITS[row, token]
            total += probability[token]
            if total >= p:
                break
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("p", [0.01, 0.3, 1.0])
def test_min_p_keeps_shares_of_the_largest_probability(p):
    found = np.asarray(keep_min_p(jnp.asarray(LOGITS), p))
    probability = softmax(LOGITS)
    expected = probability >= p * probability.max(axis=-1, keepdims=True)
    np.testing.assert_array_equal(found, np.where(expected, LOGITS, -np.inf))


def test_repetition_penalty_makes_seen_tokens_less_likely_whatever_the_sign():
    seen = np.random.default_rng(1).random(LOGITS.shape) < 0.5
    found = penalize_repetition(jnp.asarray(LOGITS), jnp.asarray(seen), 1.5)
    expected = LOGITS.copy()
    expected[seen & (LOGITS > 0)] /= np.float32(1.5)
    expected[seen & (LOGITS <= 0)] *= np.float32(1.5)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert (np.asarray(found)[seen] < LOGITS[seen]).all()


def test_the_steps_come_in_their_order():
    config = SamplingConfig(temperature=0.7, top_k=9, top_p=0.8, min_p=0.05, repetition_penalty=1.3)
    seen = jnp.asarray(np.random.default_rng(1).random(LOGITS.shape) < 0.5)
    z = penalize_repetition(jnp.asarray(LOGITS), seen, 1.3) / 0.7
    expected = keep_min_p(keep_top_p(keep_top_k(z, 9), 0.8), 0.05)
    np.testing.assert_array_equal(modify(jnp.asarray(LOGITS), config, seen), expected)
    counts = kept(expected).sum(axis=-1)
    assert (counts >= 1).all() and (counts <= 9).all()


@partial(jax.jit, static_argnums=1)
def compiled_draw(logits, config, seed, samples, position):
    seen = jnp.zeros(logits.shape, bool)
    return sample(logits, sample_keys(seed, samples), position, config, seen)


def draw(logits, config, seed=0, samples=None, position=0):
    samples = jnp.arange(len(logits)) if samples is None else jnp.asarray(samples)
    return compiled_draw(jnp.asarray(logits), config, seed, samples, position)


def test_greedy_takes_the_argmax_whatever_else_is_asked():
    tokens, _ = draw(LOGITS, SamplingConfig(temperature=0.0, top_k=3, top_p=0.5, min_p=0.5))
    np.testing.assert_array_equal(tokens, LOGITS.argmax(axis=-1))


def test_greedy_heeds_the_penalty():
    logits, config = (
        jnp.asarray([[2.0, 1.9, 0.0]]),
        SamplingConfig(temperature=0.0, repetition_penalty=2.0),
    )
    seen = jnp.asarray([[True, False, False]])
    tokens, _ = sample(logits, sample_keys(0, jnp.arange(1)), jnp.asarray(0), config, seen)
    assert tokens.tolist() == [1]


def test_log_probabilities_are_those_of_the_unmodified_model():
    config = SamplingConfig(temperature=3.0, top_k=5, repetition_penalty=2.0)
    tokens, log_probabilities = draw(LOGITS, config)
    expected = np.log(softmax(LOGITS))[np.arange(len(LOGITS)), np.asarray(tokens)]
    np.testing.assert_allclose(log_probabilities, expected, rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_frequencies_are_the_softmax(temperature):
    n, logits = 5_000, LOGITS[0, :6]
    tokens, _ = draw(np.tile(logits, (n, 1)), SamplingConfig(temperature=temperature))
    p = softmax(logits / temperature)
    count = np.bincount(np.asarray(tokens), minlength=6)
    assert (np.abs(count - n * p) < 4 * np.sqrt(n * p * (1 - p))).all()


def test_a_row_depends_on_seed_sample_and_position_only():
    flat, config = np.zeros((5, 1000), np.float32), SamplingConfig()
    tokens = np.asarray(draw(flat, config, samples=[4, 0, 2, 1, 3])[0])
    again = np.asarray(draw(flat[:2], config, samples=[2, 4])[0])
    assert again.tolist() == [tokens[2], tokens[0]]
    assert len(set(tokens.tolist())) == 5
    assert np.asarray(draw(flat, config, samples=[4, 0, 2, 1, 3], position=1)[0]).tolist() != (
        tokens.tolist()
    )
    assert np.asarray(draw(flat, config, seed=1, samples=[4, 0, 2, 1, 3])[0]).tolist() != (
        tokens.tolist()
    )


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-38, 1e-31, 1e-30, 1e-29])
def test_a_tiny_temperature_is_greedy(temperature):
    tokens, log_probabilities = draw(LOGITS, SamplingConfig(temperature=temperature, top_p=0.9))
    greedy, expected = draw(LOGITS, SamplingConfig(temperature=0.0, top_p=0.9))
    np.testing.assert_array_equal(tokens, greedy)
    np.testing.assert_array_equal(log_probabilities, expected)


def test_what_is_cut_off_is_never_drawn():
    config = SamplingConfig(temperature=5.0, top_k=3)
    drawn = {int(t) for s in range(30) for t in draw(LOGITS[:1], config, seed=s)[0]}
    assert drawn == set(np.argsort(-LOGITS[0])[:3].tolist())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("nan")),
    ],
)
def test_wrong_fields_are_named(field, value):
    with pytest.raises(UsageError, match=f"^{field}={value}: choose"):
        SamplingConfig(**{field: value}).check()
