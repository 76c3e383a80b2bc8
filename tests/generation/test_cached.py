"""Decoders that remember give what recomputing gives, token by token and past the context."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_extractor.generation import CachedDecoder, RereadingDecoder, make_decoder
from jax_extractor.models import LanguageModel, ModelConfig, TalkingHeadsConfig

LENGTH, VOCABULARY, PROMPT = 8, 13, 6
SIZES = {
    "features": 8,
    "num_layers": 2,
    "num_heads": 2,
    "max_length": LENGTH,
    "ffn_features": 8,
}
ENDLESS = [
    {"mixer": "she"},
    {"mixer": "ishe", "scan_layers": True},
    {"mixer": "he", "arrangement": "parallel"},
    {"mixer": "we", "arrangement": "ffn-mixer"},
    {"mixer": "me", "arrangement": "mixer"},
    {"mixer": "ishe", "arrangement": "ffn"},
]
BOUNDED = [
    {"mixer": "mha", "positions": "none", "arrangement": "ffn"},
    {"mixer": "mha", "positions": "learned"},
    {"mixer": "mha", "positions": "sinusoidal", "scan_layers": True},
    {"mixer": "mha", "positions": "rotary"},
    {"mixer": "mha", "positions": "none", "arrangement": "parallel"},
    {
        "mixer": "talking_heads",
        "talking_heads": TalkingHeadsConfig(
            key_heads=1, value_heads=4, position_bias=True, dynamic=True
        ),
    },
    {"mixer": "cross_modal"},
]


def make(fields):
    model = LanguageModel(ModelConfig(**(SIZES | fields)), VOCABULARY)
    tokens = jax.random.randint(jax.random.key(0), (3, 3 * LENGTH), 0, VOCABULARY)
    params = jax.jit(model.init)(jax.random.key(1), tokens[:, :LENGTH])["params"]
    # Away from the start, where position biases are zero and mixings the identity.
    keys = iter(jax.random.split(jax.random.key(2), len(jax.tree.leaves(params))))
    params = jax.tree.map(lambda p: p + 0.3 * jax.random.normal(next(keys), p.shape), params)
    return model, params, tokens


def full_pass(model, params, tokens):
    """The logits of whole rows at once."""
    return jax.jit(model.apply)({"params": params}, tokens)


def last_logits(model, params):
    """The logits after up to L tokens, of one program: what fills them up is not seen."""
    apply = jax.jit(model.apply)

    def last(seen):
        filled = jnp.pad(seen, (0, LENGTH - len(seen)))[None]
        return apply({"params": params}, filled)[0, len(seen) - 1]

    return last


def left_padded(tokens, lengths, width):
    rows = [
        np.pad(np.asarray(row[:n]), (width - n, 0)) for row, n in zip(tokens, lengths, strict=True)
    ]
    valid = np.arange(width)[None] >= width - np.asarray(lengths)[:, None]
    return jnp.asarray(np.stack(rows)), jnp.asarray(valid)


def logits_step_by_step(decoder, params, tokens, lengths, steps):
    """(steps+1, B, V): after prompts of unequal length, and after each token that follows."""
    weights = decoder.prepare(params)
    width = decoder.prompt_width(max(lengths))
    logits, state = jax.jit(decoder.prefill)(weights, *left_padded(tokens, lengths, width))
    found, step = [logits], jax.jit(decoder.step)
    for i in range(steps):
        following = jnp.stack([row[n + i] for row, n in zip(tokens, lengths, strict=True)])
        logits, state = step(weights, state, following)
        found.append(logits)
    return np.stack(found)


@pytest.mark.parametrize("fields", ENDLESS, ids=lambda fields: fields["mixer"])
def test_extractors_equal_the_full_pass_without_end(fields):
    model, params, tokens = make(fields)
    lengths, steps = (6, 1, 3), 2 * LENGTH
    decoder = make_decoder(model)
    assert isinstance(decoder, CachedDecoder)
    found = logits_step_by_step(decoder, params, tokens, lengths, steps)
    full = full_pass(model, params, tokens)
    for row, n in enumerate(lengths):
        expected = full[row, n - 1 : n + steps]
        np.testing.assert_allclose(found[:, row], expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("fields", BOUNDED, ids=str)
def test_attention_equals_the_full_pass_within_the_context(fields):
    model, params, tokens = make(fields)
    lengths = (PROMPT, 1, 3)
    steps = LENGTH - PROMPT
    found = logits_step_by_step(make_decoder(model), params, tokens, lengths, steps)
    full = full_pass(model, params, tokens[:, :LENGTH])
    for row, n in enumerate(lengths):
        expected = full[row, n - 1 : n + steps]
        np.testing.assert_allclose(found[:, row], expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("positions", ["rotary", "none"])
def test_a_ring_of_keys_is_a_window(positions):
    """One layer: the newest query sees the last L tokens."""
    model, params, tokens = make({"mixer": "mha", "positions": positions, "num_layers": 1})
    lengths, steps = (5, 2, 5), LENGTH + 3
    found = logits_step_by_step(make_decoder(model), params, tokens, lengths, steps)
    last = last_logits(model, params)
    for row, n in enumerate(lengths):
        expected = last(tokens[row, max(n + steps - LENGTH, 0) : n + steps])
        np.testing.assert_allclose(found[-1, row], expected, rtol=2e-4, atol=2e-5)


def test_embedded_positions_go_on_from_half_the_context():
    """A row with n tokens, n > L, sees those since its last rereading, L/2 and more of them."""
    model, params, tokens = make({"mixer": "mha"})
    lengths, steps = (6, 1, 3), 2 * LENGTH
    decoder = make_decoder(model)
    assert isinstance(decoder, RereadingDecoder)
    found = logits_step_by_step(decoder, params, tokens, lengths, steps)
    half, last = LENGTH // 2, last_logits(model, params)
    for row, n in enumerate(lengths):
        for i in range(steps + 1):
            total = n + i
            over = max(total - LENGTH, 0)
            rereadings = -(-over // (LENGTH - half + 1))
            kept = total - rereadings * (LENGTH - half + 1) if over else total
            expected = last(tokens[row, total - kept : total])
            np.testing.assert_allclose(found[i, row], expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("fields", [ENDLESS[1], BOUNDED[0], BOUNDED[4]], ids=str)
def test_select_takes_rows(fields):
    model, params, tokens = make(fields)
    decoder = make_decoder(model)
    weights = decoder.prepare(params)
    rows = jnp.asarray([2, 0, 0, 1])
    valid = jnp.ones((3, 4), bool).at[1, :2].set(False)
    _, state = jax.jit(decoder.prefill)(weights, tokens[:, :4], valid)
    step = jax.jit(decoder.step)
    picked, _ = step(weights, decoder.select(state, rows), tokens[rows, 4])
    straight, _ = step(weights, state, tokens[:, 4])
    np.testing.assert_allclose(picked, straight[rows], rtol=1e-5, atol=1e-6)


def test_prompts_of_similar_length_share_a_width():
    model, _, _ = make({"mixer": "ishe"})
    decoder = CachedDecoder(model)
    assert {decoder.prompt_width(n) for n in range(17, 33)} == {32}
    assert {decoder.prompt_width(n) for n in range(0, 17)} == {16}
    assert {RereadingDecoder(model).prompt_width(n) for n in (1, 100)} == {LENGTH}
