"""The language model: embedding, positions, core, norm, softmax; padding; causality; errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_extractor.errors import UsageError
from jax_extractor.models import Core, LanguageModel, ModelConfig
from jax_extractor.models.language_model import sinusoids

pytestmark = pytest.mark.core

B, T, V, L = 3, 7, 11, 7
SIZES = {"features": 12, "num_layers": 2, "num_heads": 3, "max_length": L, "ffn_features": 16}
TOKENS = np.random.default_rng(0).integers(0, V, (B, T))
POSITIONS = ("learned", "sinusoidal", "rotary", "none")
ARRANGEMENTS = ("mixer-ffn", "ffn-mixer", "mixer", "ffn", "parallel")
KINDS = (
    [{"mixer": "mha", "positions": positions} for positions in POSITIONS]
    + [{"mixer": "ishe", "max_length": 3, "arrangement": name} for name in ARRANGEMENTS]
    + [{"mixer": "mha", "arrangement": name} for name in ("ffn-mixer", "parallel")]
    + [{"mixer": "he"}]
    + [{"mixer": "mha", "pre_norm": False, "tied": True, "scan_layers": True, "remat": True}]
)
every_kind = pytest.mark.parametrize(
    "kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values()))
)


def build(**fields):
    return LanguageModel(ModelConfig(**(SIZES | fields)), V)


def variables_of(model):
    """Random parameters, those included that start at 0 or 1."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.asarray(TOKENS))
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape) / 2, p.dtype), shapes)


@functools.cache
def _runner(fields):
    model = build(**dict(fields))
    variables = variables_of(model)
    compiled = jax.jit(functools.partial(model.apply, return_rows=True))

    def run(tokens, valid=None):
        valid = None if valid is None else jnp.asarray(valid)
        return map(np.asarray, compiled(variables, jnp.asarray(tokens), valid))

    return variables["params"], run


def runner(**fields):
    """(parameters, function of (tokens, valid) to (logits, rows)), compiled once."""
    return _runner(tuple(fields.items()))


def norm(x, params):
    y = x - x.mean(-1, keepdims=True)
    y = y / np.sqrt(y.var(-1, keepdims=True) + 1e-6)
    return y * np.asarray(params["scale"]) + np.asarray(params["bias"])


@every_kind
def test_left_padding_changes_no_real_position(kind):
    """4 real tokens after 3 of padding, whose ids are arbitrary."""
    _, run = runner(**kind)
    valid = np.broadcast_to(np.arange(T) >= 3, (B, T))
    logits, rows = run(TOKENS, valid)
    expected, expected_rows = run(TOKENS[:, 3:])
    scale = np.abs(expected).max()
    np.testing.assert_allclose(logits[:, 3:], expected, rtol=0, atol=1e-5 * scale)
    scale = np.abs(expected_rows).max()
    np.testing.assert_allclose(rows[:, :, 3:], expected_rows, rtol=0, atol=1e-5 * scale)
    other, _ = run(np.where(valid, TOKENS, 5), valid)
    np.testing.assert_allclose(other[:, 3:], logits[:, 3:], rtol=0, atol=1e-5 * scale)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(KINDS[:5]),
    lengths=st.lists(st.integers(0, T), min_size=B, max_size=B),
    t=st.integers(0, T - 1),
)
def test_no_logit_depends_on_padding_neighbours_or_the_future(kind, lengths, t):
    _, run = runner(**kind)
    valid = np.arange(T) >= T - np.array(lengths)[:, None]
    logits, _ = run(TOKENS, valid)
    assert np.isfinite(logits).all()
    tokens = np.where(valid, TOKENS, (TOKENS + 1) % V)
    tokens[:, t:] = (tokens[:, t:] + 3) % V
    tokens[1] = TOKENS[1]
    other, _ = run(tokens, valid)
    scale = np.abs(logits).max()
    np.testing.assert_allclose(other[1][valid[1]], logits[1][valid[1]], atol=1e-5 * scale)
    for b in (0, 2):
        past = valid[b] & (np.arange(T) < t)
        np.testing.assert_allclose(other[b][past], logits[b][past], atol=1e-5 * scale)
        if valid[b, t]:
            assert np.abs(other[b, t] - logits[b, t]).max() > 1e-3


def test_the_receptive_field_is_a_window_per_layer():
    """iSHE with L = 3 in 2 layers: a token reaches its own logits and those of the next 4."""
    _, run = runner(mixer="ishe", max_length=3, arrangement="mixer-ffn")
    everything = np.ones((B, T), bool)
    tokens = TOKENS.copy()
    tokens[:, 0] = (tokens[:, 0] + 1) % V
    change = np.abs(next(run(tokens, everything)) - next(run(TOKENS, everything))).max(axis=(0, 2))
    assert (change[:5] > 1e-3).all()
    assert (change[5:] < 1e-5).all()


@pytest.mark.parametrize("positions", POSITIONS)
def test_is_the_composition_of_its_parts(positions):
    fields = {"mixer": "mha", "positions": positions}
    tied = positions == "sinusoidal"
    if tied:
        fields["tied"] = True
    params, run = runner(**fields)
    names = {"embed", "core", "final_norm"} | ({"positions"} if positions == "learned" else set())
    assert set(params) == names | (set() if tied else {"softmax"})
    logits, rows = run(TOKENS[:, :4])
    table = np.asarray(params["embed"]["embedding"])
    x = table[TOKENS[:, :4]]
    if positions == "learned":
        x = x + np.asarray(params["positions"])[:4]
    elif positions == "sinusoidal":
        x = x + sinusoids(L, 12)[:4]
    np.testing.assert_allclose(rows[0], x, rtol=1e-6, atol=1e-6)
    core = Core(ModelConfig(**(SIZES | fields)))
    output, _ = jax.jit(core.apply)({"params": params["core"]}, jnp.asarray(x))
    np.testing.assert_allclose(rows[-1], output, rtol=1e-5, atol=1e-5)
    assert rows.shape == (3, B, 4, 12)
    matrix = table.T if tied else np.asarray(params["softmax"]["kernel"])
    expected = norm(rows[-1], params["final_norm"]) @ matrix
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    assert (logits.shape, logits.dtype) == ((B, 4, V), np.float32)


def test_sinusoids():
    """Row p, column k < half: sin(p / 10000^(k/half)), then the cosines; odd widths end early."""
    for width in (6, 7):
        half = (width + 1) // 2
        table = sinusoids(9, width)
        assert (table.shape, table.dtype) == ((9, width), np.float32)
        for p, c in np.ndindex(9, width):
            k, wave = (c, np.sin) if c < half else (c - half, np.cos)
            assert table[p, c] == pytest.approx(wave(p * 10_000 ** (-k / half)), abs=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_bfloat16_compute_has_float32_parameters_and_logits(tied):
    model, single = build(tied=tied, dtype="bfloat16"), build(tied=tied)
    apply = jax.jit(functools.partial(model.apply, return_rows=True))
    variables = variables_of(single)
    with jax.numpy_dtype_promotion("standard"):  # Flax's LayerNorm promotes implicitly
        shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.asarray(TOKENS))
        logits, rows = apply(variables, jnp.asarray(TOKENS))
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype("float32")}
    assert (logits.dtype, rows.dtype) == (jnp.float32, jnp.bfloat16)
    expected = np.asarray(jax.jit(single.apply)(variables, jnp.asarray(TOKENS)))
    error = np.abs(np.asarray(logits) - expected)
    assert 0 < error.max() < 0.05 * np.abs(expected).max()
    # The logits themselves are not rounded to bfloat16.
    rounded = np.asarray(logits.astype(jnp.bfloat16).astype(jnp.float32))
    assert (np.asarray(logits) != rounded).mean() > 0.9


def test_dropout_on_the_embedding():
    model = LanguageModel(ModelConfig(**SIZES, arrangement="ffn", dropout=0.5), V)
    tokens = jnp.asarray(TOKENS)
    variables = variables_of(model)

    def rows_of(key):
        return model.apply(variables, tokens, None, False, True, rngs={"dropout": key})[1]

    first = np.asarray(jax.jit(rows_of)(jax.random.key(0))[0])
    exact = np.asarray(variables["params"]["embed"]["embedding"])[TOKENS]
    kept = first != 0
    assert 0.3 < kept.mean() < 0.7
    np.testing.assert_allclose(first[kept], 2 * exact[kept], rtol=1e-6)


@pytest.mark.parametrize("kind", [{"mixer": "ishe"}, {"mixer": "mha"}], ids=["ishe", "mha"])
def test_gradients_with_an_empty_row_are_those_of_the_others(kind):
    model = build(**kind)
    variables = variables_of(model)

    @jax.jit
    def grad(weights, valid):
        def loss(variables):
            logits = model.apply(variables, jnp.asarray(TOKENS), valid)
            return jnp.sum(jnp.square(logits) * weights[:, None, None])

        return jax.tree.leaves(jax.grad(loss)(variables))

    valid = np.ones((B, T), bool)
    empty = valid.copy()
    empty[1] = False
    weights = jnp.asarray([1.0, 0.0, 1.0])
    for got, want in zip(grad(weights, empty), grad(weights, valid), strict=True):
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(
    ("fields", "tokens", "message"),
    [
        (
            {"mixer": "mha"},
            jnp.zeros((1, L + 1), jnp.int32),
            "8 tokens, but max_length=7 positions are embedded: "
            "shorten the input or train with a larger model.max_length",
        ),
        (
            {"mixer": "mha", "positions": "sinusoidal"},
            jnp.zeros((1, L + 2), jnp.int32),
            "9 tokens, but max_length=7 positions are embedded",
        ),
        ({}, jnp.zeros((1, 4)), r"tokens have shape \(1, 4\) and dtype float32: a language model"),
        ({}, jnp.zeros(4, jnp.int32), r"tokens have shape \(4,\) and dtype int32: a language"),
        ({"num_layers": 0}, jnp.zeros((1, 4), jnp.int32), "model.num_layers=0: choose at least 1"),
        (
            {"mixer": "mha", "num_heads": 5},
            jnp.zeros((1, 4), jnp.int32),
            "features=12 is not divisible by num_heads=5: choose 10 or 15",
        ),
    ],
)
def test_what_does_not_fit_is_named(fields, tokens, message):
    with pytest.raises(UsageError, match=message):
        jax.eval_shape(build(**fields).init, jax.random.key(0), tokens)


@pytest.mark.parametrize("kind", [{"mixer": "ishe"}, {"mixer": "mha", "positions": "rotary"}])
def test_without_embedded_positions_any_length_is_read(kind):
    tokens = jnp.zeros((1, 3 * L), jnp.int32)
    model = build(**kind)
    logits = jax.eval_shape(model.init_with_output, jax.random.key(0), tokens)[0]
    assert logits.shape == (1, 3 * L, V)
