"""Talking heads as a module: against a float64 loop, against attention, and across two sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_extractor import ops
from jax_extractor.errors import UsageError
from jax_extractor.mixers import CrossModalTalkingHeads, MultiHeadAttention, TalkingHeadsAttention

pytestmark = pytest.mark.core

B, T, S, D = 2, 5, 4, 6
DYNAMIC = {
    "dynamic_query_logits": True,
    "dynamic_memory_logits": True,
    "dynamic_query_weights": True,
    "dynamic_memory_weights": True,
}


def draw(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def unit_scale(mixer, *args, **kwargs):
    """Variables in which nothing is zero, the identity or tiny."""
    shapes = jax.eval_shape(lambda: mixer.init(jax.random.key(0), *args, **kwargs))
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape) / 2, p.dtype), shapes)


def by_loops(params, x, memory, visible, counts, bias=None, scale_features=D):
    """The equations of the module's docstring, one query, key and head at a time."""
    p = {
        name: np.asarray(leaf["kernel"] if isinstance(leaf, dict) else leaf)
        for name, leaf in params.items()
    }
    key_heads, heads, value_heads = counts
    x, memory = np.asarray(x), np.asarray(memory)
    out = np.zeros((*x.shape[:2], p["output"].shape[1]))
    for b in range(len(x)):
        q = (x[b] @ p["query"]).reshape(x.shape[1], key_heads, -1)
        k = (memory[b] @ p["key"]).reshape(memory.shape[1], key_heads, -1)
        v = (memory[b] @ p["value"]).reshape(memory.shape[1], value_heads, -1)
        for i in range(x.shape[1]):
            keys = [j for j in range(memory.shape[1]) if visible[b, i, j]]
            logits = np.zeros((heads, len(keys)))
            posts = []
            for n, j in enumerate(keys):
                pre, post = p["pre_mixing"].copy(), p["post_mixing"].copy()
                for side, row in (("query", x[b, i]), ("memory", memory[b, j])):
                    if f"dynamic_{side}_logits" in p:
                        pre = pre + (row @ p[f"dynamic_{side}_logits"]).reshape(pre.shape)
                        post = post + (row @ p[f"dynamic_{side}_weights"]).reshape(post.shape)
                scores = np.array([q[i, h] @ k[j, h] for h in range(key_heads)])
                logits[:, n] = scores / np.sqrt(q.shape[-1]) @ pre
                if bias is not None:
                    logits[:, n] += bias[:, i, j]
                posts.append(post)
            weights = np.exp(logits - logits.max(1, keepdims=True, initial=-1e30))
            weights /= np.maximum(weights.sum(1, keepdims=True), 1e-300)
            o = np.zeros(v.shape[1:])
            for n, j in enumerate(keys):
                o += (weights[:, n] @ posts[n])[:, None] * v[j]
            out[b, i] = o.reshape(-1) @ p["output"]
    return out


@pytest.mark.parametrize("counts", [(2, 3, 1), (3, 2, 6)])
@pytest.mark.parametrize("dynamic", [{}, DYNAMIC], ids=["static", "dynamic"])
def test_self_attention_against_loops(counts, dynamic, x64):
    x = draw(B, T, D, dtype=jnp.float64)
    valid = jnp.asarray([[True] * T, [False, False, True, True, True]])
    mixer = TalkingHeadsAttention(
        key_heads=counts[0], heads=counts[1], value_heads=counts[2], key_width=4,
        param_dtype=jnp.float64, **dynamic,
    )  # fmt: skip
    variables = unit_scale(mixer, x)
    visible = np.tril(np.ones((T, T), bool))[None] & np.asarray(valid)[:, None]
    expected = by_loops(variables["params"], x, x, visible, counts)
    found = mixer.apply(variables, x, valid)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
    assert not np.any(found[1, :2])


@pytest.mark.parametrize("dynamic", [{}, DYNAMIC], ids=["static", "dynamic"])
def test_cross_attention_against_loops(dynamic, x64):
    counts = (2, 3, 1)
    x, memory = draw(B, T, D, dtype=jnp.float64), draw(B, S, D + 2, seed=1, dtype=jnp.float64)
    memory_valid = jnp.asarray([[True, False, True, False], [False] * S])
    mixer = TalkingHeadsAttention(
        key_heads=2, heads=3, value_heads=1, param_dtype=jnp.float64, **dynamic
    )
    inputs = {"memory": memory, "memory_valid": memory_valid}
    variables = unit_scale(mixer, x, **inputs)
    visible = np.broadcast_to(np.asarray(memory_valid)[:, None], (B, T, S))
    expected = by_loops(variables["params"], x, memory, visible, counts)
    found, grads = jax.value_and_grad(
        lambda v: jnp.sum(jnp.sin(mixer.apply(v, x, **inputs))), has_aux=False
    )(variables)
    np.testing.assert_allclose(found, np.sin(expected).sum(), rtol=1e-10)
    assert not np.any(mixer.apply(variables, x, **inputs)[1])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_position_bias_is_by_offset_and_reaches_so_far():
    x = draw(B, T, D)
    mixer = TalkingHeadsAttention(num_heads=2, max_length=3, position_bias=True)
    variables = unit_scale(mixer, x)
    table = np.asarray(variables["params"]["position_bias"])
    offset = np.minimum(np.abs(np.arange(T)[:, None] - np.arange(T)), 2)
    params = {k: v for k, v in variables["params"].items() if k != "position_bias"}
    visible = np.broadcast_to(np.tril(np.ones((T, T), bool)), (B, T, T))
    expected = by_loops(params, x, x, visible, (2, 2, 2), bias=table[:, offset])
    np.testing.assert_allclose(mixer.apply(variables, x), expected, rtol=2e-5, atol=2e-6)


def test_begins_as_plain_attention():
    """Identity mixings, the start of square ones, change nothing; without mixings nothing is left."""
    x = draw(B, T, D)
    plain = MultiHeadAttention(num_heads=3)
    expected = plain.apply(plain.init(jax.random.key(1), x), x)
    shared = plain.init(jax.random.key(1), x)["params"]
    talking = TalkingHeadsAttention(num_heads=3)
    params = talking.init(jax.random.key(2), x)["params"] | shared
    np.testing.assert_allclose(talking.apply({"params": params}, x), expected, rtol=1e-5, atol=1e-6)
    silent = TalkingHeadsAttention(num_heads=3, mix_logits=False, mix_weights=False)
    assert jax.tree.structure(silent.init(jax.random.key(0), x)["params"]) == jax.tree.structure(
        shared
    )
    np.testing.assert_allclose(silent.apply({"params": shared}, x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("init", ["identity", "orthogonal", "normal"])
def test_mixings_start_as_asked_and_learn(init):
    x = draw(B, T, D)
    counts = {"key_heads": 4, "heads": 4, "value_heads": 4, "key_width": 2, "value_width": 2}
    mixer = TalkingHeadsAttention(**counts, mixing_init=init)
    params = mixer.init(jax.random.key(5), x)["params"]
    for name in ("pre_mixing", "post_mixing"):
        mixing = np.asarray(params[name])
        if init == "identity":
            np.testing.assert_array_equal(mixing, np.eye(4))
        elif init == "orthogonal":
            np.testing.assert_allclose(mixing.T @ mixing, np.eye(4), atol=1e-5)
            assert np.abs(mixing - np.eye(4)).max() > 0.1
        else:
            assert 0.1 < mixing.std() < 1.2
    grads = jax.grad(lambda p: jnp.sum(jnp.sin(mixer.apply({"params": p}, x))))(params)
    assert all(np.abs(grads[name]).max() > 1e-6 for name in ("pre_mixing", "post_mixing"))


def test_dynamic_terms_start_small():
    """Their standard deviation is dynamic_scale for inputs of variance 1."""
    x = draw(64, 8, 32)
    mixer = TalkingHeadsAttention(num_heads=4, **DYNAMIC)
    params = mixer.init(jax.random.key(0), x)["params"]
    for side in ("query_logits", "memory_logits", "query_weights", "memory_weights"):
        terms = np.asarray(x) @ np.asarray(params[f"dynamic_{side}"]["kernel"])
        np.testing.assert_allclose(terms.std(), 1e-2, rtol=0.15)


def test_parameter_count():
    x = draw(B, T, 12)
    mixer = TalkingHeadsAttention(key_heads=2, heads=3, value_heads=4)
    count = sum(p.size for p in jax.tree.leaves(mixer.init(jax.random.key(0), x)))
    assert count == 4 * 12**2 + 2 * 3 + 3 * 4


@pytest.mark.parametrize("field", ["logits_dropout", "weights_dropout"])
def test_dropout_needs_training_and_follows_its_key(field):
    x = draw(B, T, D)
    mixer = TalkingHeadsAttention(num_heads=2, **{field: 0.5})
    variables = unit_scale(mixer, x)

    def run(seed):
        return mixer.apply(
            variables, x, deterministic=False, rngs={"dropout": jax.random.key(seed)}
        )

    calm = TalkingHeadsAttention(num_heads=2).apply(variables, x)
    np.testing.assert_array_equal(mixer.apply(variables, x), calm)
    np.testing.assert_array_equal(run(0), run(0))
    assert np.abs(run(0) - run(1)).max() > 1e-3
    many = jax.vmap(run)(jnp.arange(400))
    if field == "weights_dropout":  # linear behind it, so the mean is the calm output
        np.testing.assert_allclose(many.mean(0), calm, atol=0.35)


def test_maps_show_what_the_output_is_made_of():
    x = draw(B, T, D)
    mixer = TalkingHeadsAttention(key_heads=2, heads=3, value_heads=1)
    variables = unit_scale(mixer, x)
    out, sown = mixer.apply(variables, x, mutable=["intermediates"])
    (maps,) = sown["intermediates"]["maps"]
    assert isinstance(maps, ops.AttentionMaps)
    assert maps.logits.shape == (B, 3, T, T)
    np.testing.assert_allclose(maps.weights.sum(-1), 1, rtol=1e-6)
    values = x @ variables["params"]["value"]["kernel"]
    rebuilt = (maps.mixed[:, 0] @ values) @ variables["params"]["output"]["kernel"]
    np.testing.assert_allclose(rebuilt, out, rtol=2e-5, atol=2e-6)


class TestCrossModal:
    """Two sequences at once."""

    def inputs(self):
        x, y = draw(B, T, D), draw(B, S, D + 2, seed=1)
        x_valid = jnp.asarray([[True] * T, [True, True, False, True, False]])
        y_valid = jnp.asarray([[False, True, True, True], [True] * S])
        return x, x_valid, y, y_valid

    def test_each_direction_is_cross_attention_with_its_own_mixing(self):
        x, x_valid, y, y_valid = self.inputs()
        mixer = CrossModalTalkingHeads(num_heads=3, other_heads=2)
        variables = unit_scale(mixer, x, x_valid, other=y, other_valid=y_valid)
        from_other, to_other = (variables["params"][n] for n in ("from_other", "to_other"))
        assert from_other["pre_mixing"].shape == (3, 2)
        assert to_other["pre_mixing"].shape == (2, 3)
        found = mixer.apply(variables, x, x_valid, other=y, other_valid=y_valid)
        visible = np.broadcast_to(np.asarray(y_valid)[:, None], (B, T, S))
        expected = by_loops(from_other, x, y, visible, (3, 2, 2))
        np.testing.assert_allclose(found[0], expected, rtol=5e-5, atol=5e-6)
        visible = np.broadcast_to(np.asarray(x_valid)[:, None], (B, S, T))
        expected = by_loops(to_other, y, x, visible, (2, 3, 3))
        np.testing.assert_allclose(found[1], expected, rtol=5e-5, atol=5e-6)

    def test_masked_rows_of_the_other_leave_no_trace(self):
        x, x_valid, y, y_valid = self.inputs()
        mixer = CrossModalTalkingHeads(num_heads=3, other_heads=2)
        variables = unit_scale(mixer, x, x_valid, other=y, other_valid=y_valid)
        spoilt = jnp.where(y_valid[..., None], y, 1e6)
        before = mixer.apply(variables, x, x_valid, other=y, other_valid=y_valid)
        after = mixer.apply(variables, x, x_valid, other=spoilt, other_valid=y_valid)
        np.testing.assert_array_equal(before[0], after[0])

    def test_one_sequence_is_the_mean_of_both_directions(self):
        x = draw(B, T, D)
        mixer = CrossModalTalkingHeads(num_heads=3, other_heads=2)
        variables = unit_scale(mixer, x)
        outs = []
        for name, (queries, values) in {"from_other": (3, 2), "to_other": (2, 3)}.items():
            one = TalkingHeadsAttention(key_heads=queries, heads=values, value_heads=values)
            outs.append(one.apply({"params": variables["params"][name]}, x))
        expected = (outs[0] + outs[1]) / 2
        np.testing.assert_allclose(mixer.apply(variables, x), expected, rtol=1e-6, atol=1e-6)

    def test_nnx(self):
        x, x_valid, y, y_valid = self.inputs()
        linen = CrossModalTalkingHeads(num_heads=3)
        mixer = nnx.bridge.ToNNX(linen, rngs=nnx.Rngs(0)).lazy_init(x, other=y)
        first, second = mixer(x, x_valid, other=y, other_valid=y_valid)
        assert first.shape == x.shape
        assert second.shape == y.shape


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"heads": 0}, "heads=0: choose at least 1"),
        ({"key_heads": 2, "heads": 3, "mix_logits": False}, "key_heads=2 and heads=3"),
        ({"value_heads": 2, "heads": 3, "mix_weights": False}, "heads=3 and value_heads=2"),
        ({"num_heads": 7}, "key_heads=7 share features=6: choose fewer heads or more features"),
        ({"num_heads": 2, "mixing_init": "zero"}, "unknown mixing_init 'zero'"),
        ({"num_heads": 2, "rotary": True, "key_width": 3}, "choose an even width"),
        ({"num_heads": 2, "position_bias": True}, "max_length=None"),
        ({"num_heads": 2, "key_width": 0}, "key_width=0"),
    ],
)
def test_refuses(options, words):
    with pytest.raises(UsageError) as caught:
        TalkingHeadsAttention(**options).init(jax.random.key(0), draw(B, T, D))
    assert words in str(caught.value)


def test_refuses_a_cache_it_cannot_keep():
    x = draw(B, T, D)
    for mixer, words in (
        (TalkingHeadsAttention(num_heads=2), "max_length=None"),
        (TalkingHeadsAttention(num_heads=2, max_length=4, causal=False), "causal=False"),
    ):
        variables = mixer.init(jax.random.key(0), x)
        with pytest.raises(UsageError) as caught:
            mixer.apply(variables, x, decode=True, mutable=["cache"])
        assert words in str(caught.value)
