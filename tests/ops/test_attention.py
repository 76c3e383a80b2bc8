"""Attention on one dense block: golden cases, properties, and the errors of the border."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jax_extractor import ops
from jax_extractor.errors import UsageError
from jax_extractor.ops import DynamicMixing

pytestmark = pytest.mark.core

# Compiled, because operation by operation most of a test's time would be compilation.
OPTIONS = ("causal", "block_size", "dropout")
talking_heads_attention = jax.jit(ops.talking_heads_attention, static_argnames=OPTIONS)
dot_product_attention = jax.jit(ops.dot_product_attention, static_argnames=OPTIONS)
attention_maps = jax.jit(ops.attention_maps, static_argnames="causal")

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "talking_heads.npz")
CASES = sorted({key.split("/")[0] for key in GOLDEN})


def golden(case, dtype):
    """The case's arrays by name, floating ones in this dtype."""
    arrays = {key.split("/")[1]: GOLDEN[key] for key in GOLDEN if key.startswith(f"{case}/")}
    return {n: jnp.asarray(x) if n == "mask" else jnp.asarray(x, dtype) for n, x in arrays.items()}


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def heads_of_three_counts(*, t=6, s=7, batch=(2,), dtype=jnp.float32):
    """q, k, v, pre, post with 3 key heads, 5 softmax heads and 2 value heads."""
    q, k, v = normal(0, *batch, t, 3, 4), normal(1, *batch, s, 3, 4), normal(2, *batch, s, 2, 6)
    return [x.astype(dtype) for x in (q, k, v, normal(3, 3, 5), normal(4, 5, 2))]


@pytest.mark.parametrize("case", CASES)
def test_golden_float64(case, x64):
    g = golden(case, jnp.float64)
    o = talking_heads_attention(g["q"], g["k"], g["v"], g.get("pre"), g.get("post"), mask=g["mask"])
    np.testing.assert_allclose(o, g["out"], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("case", CASES)
def test_golden_float32(case):
    g = golden(case, jnp.float32)
    o = talking_heads_attention(g["q"], g["k"], g["v"], g.get("pre"), g.get("post"), mask=g["mask"])
    assert o.dtype == jnp.float32
    np.testing.assert_allclose(o, GOLDEN[f"{case}/out"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_inputs_lose_only_their_own_rounding(case):
    """Against float32 on the same rounded inputs: the weights' and the output's 8 bits are lost."""
    g = golden(case, jnp.bfloat16)
    exact = {n: x if n == "mask" else x.astype(jnp.float32) for n, x in g.items()}

    def run(g):
        return talking_heads_attention(
            g["q"], g["k"], g["v"], g.get("pre"), g.get("post"), mask=g["mask"]
        )

    low = run(g)
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(low.astype(jnp.float32), run(exact), rtol=2**-7, atol=2**-7)


def test_plain_attention_is_jax_nn():
    q, k, v = normal(0, 2, 6, 4, 8), normal(1, 2, 7, 4, 8), normal(2, 2, 7, 4, 8)
    bias, mask = normal(3, 2, 4, 6, 7), normal(4, 2, 1, 6, 7) > -1
    ours = dot_product_attention(q, k, v, bias=bias, mask=mask, scale=0.3)
    theirs = jax.nn.dot_product_attention(q, k, v, bias=bias, mask=mask, scale=0.3)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_identity_mixings_are_plain_attention():
    q, k, v = normal(0, 2, 6, 4, 8), normal(1, 2, 6, 4, 8), normal(2, 2, 6, 4, 8)
    mixed = talking_heads_attention(q, k, v, jnp.eye(4), jnp.eye(4), causal=True)
    np.testing.assert_allclose(
        mixed, dot_product_attention(q, k, v, causal=True), rtol=1e-6, atol=1e-7
    )


def test_permuting_heads_consistently_changes_nothing():
    q, k, v, pre, post = heads_of_three_counts()
    key_order, order, value_order = jnp.array([2, 0, 1]), jnp.array([3, 1, 4, 0, 2]), [1, 0]
    value_order = jnp.array(value_order)
    permuted = talking_heads_attention(
        q[..., key_order, :],
        k[..., key_order, :],
        v[..., value_order, :],
        pre[key_order][:, order],
        post[order][:, value_order],
    )
    expected = talking_heads_attention(q, k, v, pre, post)[..., value_order, :]
    np.testing.assert_allclose(permuted, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block_size", [2, 6])
def test_masked_keys_do_not_leak(block_size):
    """Not one bit of the output changes when keys and values nobody may see become enormous."""
    q, k, v, pre, post = heads_of_three_counts()
    mask = jnp.arange(7) < 5

    def run(k, v):
        return talking_heads_attention(q, k, v, pre, post, mask=mask, block_size=block_size)

    hidden = jnp.where(mask, 0.0, 1e6)[:, None, None]
    np.testing.assert_array_equal(run(k, v), run(k + hidden, v - hidden))
    dk, dv = jax.jit(jax.grad(lambda k, v: jnp.sum(run(k, v) ** 2), (0, 1)))(k, v)
    assert float(abs(dk[:, :5]).min()) > 0
    np.testing.assert_array_equal(dk[:, 5:], 0)
    np.testing.assert_array_equal(dv[:, 5:], 0)


@pytest.mark.parametrize("block_size", [2, 6])
@pytest.mark.parametrize("s", [6, 9])
def test_causal_outputs_ignore_the_future(s, block_size):
    q, k, v, pre, post = heads_of_three_counts(s=s)

    def run(k, v):
        return talking_heads_attention(q, k, v, pre, post, causal=True, block_size=block_size)

    for last in range(6):  # the last key that the query of this index sees
        future = jnp.where(jnp.arange(s) > last + s - 6, 1e6, 0.0)[:, None, None]
        before, after = run(k, v), run(k + future, v + future)
        np.testing.assert_array_equal(before[:, : last + 1], after[:, : last + 1])
        if last < 5:
            assert not np.allclose(before[:, last + 1], after[:, last + 1])


def test_causal_is_the_aligned_triangular_mask():
    q, k, v, pre, post = heads_of_three_counts(t=4, s=7)
    triangle = jnp.tril(jnp.ones((4, 7), bool), k=3)
    padding = jnp.arange(7) > 1
    np.testing.assert_array_equal(
        talking_heads_attention(q, k, v, pre, post, causal=True, mask=padding),
        talking_heads_attention(q, k, v, pre, post, mask=triangle & padding),
    )


@pytest.mark.parametrize("block_size", [2, 6])
@pytest.mark.parametrize("mixed", [True, False])
def test_rows_without_keys_are_zero_with_finite_gradients(mixed, block_size):
    q, k, v, pre, post = heads_of_three_counts()
    if not mixed:
        q, k, pre, post = q[..., :2, :], k[..., :2, :], None, None
    mask = jnp.ones((6, 7), bool).at[2].set(False)
    bias = jnp.zeros((6, 7)).at[4].set(-jnp.inf)

    def run(q, k, v, bias):
        return talking_heads_attention(
            q, k, v, pre, post, mask=mask, bias=bias, block_size=block_size
        )

    o = run(q, k, v, bias)
    np.testing.assert_array_equal(o[:, jnp.array([2, 4])], 0)
    assert float(abs(o[:, 3]).min()) > 0
    gradients = jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(run(*a))), (0, 1, 2, 3)))
    for g in gradients(q, k, v, bias):
        assert bool(jnp.isfinite(g).all())
        assert float(abs(g).max()) > 0


def test_causal_with_more_queries_than_keys_leaves_the_first_empty():
    q, k, v, pre, post = heads_of_three_counts(t=7, s=4)
    o = talking_heads_attention(q, k, v, pre, post, causal=True)
    np.testing.assert_array_equal(o[:, :3], 0)
    np.testing.assert_allclose(
        o[:, 3:],
        talking_heads_attention(q[:, 3:], k, v, pre, post, causal=True),
        rtol=1e-5,
        atol=1e-6,
    )


def test_a_mask_per_head_hides_a_key_from_that_head_alone():
    q, k, v = normal(0, 1, 3, 2, 4), normal(1, 1, 3, 2, 4), normal(2, 1, 3, 2, 4)
    mask = jnp.ones((2, 3, 3), bool).at[1, :, 2].set(False)
    both = dot_product_attention(q, k, v, mask=mask)
    np.testing.assert_array_equal(both[..., 0, :], dot_product_attention(q, k, v)[..., 0, :])
    short = dot_product_attention(q, k[:, :2], v[:, :2])
    np.testing.assert_allclose(both[..., 1, :], short[..., 1, :], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_any_leading_axes(batch):
    q, k, v, pre, post = heads_of_three_counts(batch=batch)
    mask = normal(7, *batch, 1, 6, 7) > -1
    o = talking_heads_attention(q, k, v, pre, post, mask=mask)
    assert o.shape == (*batch, 6, 2, 6)
    for index in np.ndindex(*batch):
        one = talking_heads_attention(q[index], k[index], v[index], pre, post, mask=mask[index])
        np.testing.assert_allclose(o[index], one, rtol=1e-5, atol=1e-6)


def test_dynamic_terms_are_projections_of_each_pair(x64):
    """Against one projection P + query[t] + memory[s] per pair, written out."""
    q, k, v, pre, post = (x.astype(jnp.float64) for x in heads_of_three_counts())
    terms = [normal(10 + n, *s, dtype=jnp.float64) for n, s in enumerate(
        [(2, 6, 3, 5), (2, 7, 3, 5), (2, 6, 5, 2), (2, 7, 5, 2)]
    )]  # fmt: skip
    o = talking_heads_attention(
        q, k, v, pre, post,
        dynamic_pre=DynamicMixing(*terms[:2]), dynamic_post=DynamicMixing(*terms[2:]),
    )  # fmt: skip

    def whole(static, query, memory):
        return static + query[:, :, None] + memory[:, None]

    j = jnp.einsum("btgd,bsgd->btsg", q, k) / 2
    w = jax.nn.softmax(jnp.einsum("btsg,btsgh->btsh", j, whole(pre, *terms[:2])), axis=2)
    u = jnp.einsum("btsh,btshv->btsv", w, whole(post, *terms[2:]))
    np.testing.assert_allclose(o, jnp.einsum("btsv,bsvd->btvd", u, v), rtol=1e-11, atol=1e-13)


def test_maps_are_the_steps_of_the_output():
    q, k, v, pre, post = heads_of_three_counts()
    mask, bias = normal(7, 2, 1, 6, 7) > -1, normal(8, 5, 6, 7)
    maps = attention_maps(q, k, pre, post, mask=mask, bias=bias)
    np.testing.assert_allclose(
        maps.scores, jnp.einsum("btgd,bsgd->bgts", q, k) / 2, rtol=1e-5, atol=1e-6
    )
    logits = jnp.einsum("bgts,gh->bhts", maps.scores, pre) + bias
    np.testing.assert_allclose(maps.logits, jnp.where(mask, logits, -jnp.inf), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(maps.weights.sum(-1), 1, rtol=1e-6)
    np.testing.assert_allclose(maps.weights, jax.nn.softmax(maps.logits), rtol=1e-5, atol=1e-7)
    o = talking_heads_attention(q, k, v, pre, post, mask=mask, bias=bias)
    np.testing.assert_allclose(
        jnp.einsum("bhts,bshd->bthd", maps.mixed, v), o, rtol=1e-5, atol=1e-5
    )


def test_dropout_zeroes_and_rescales(x64):
    """With one-hot values the output is the mixed weights themselves."""
    q, k = normal(0, 40, 3, 8, dtype=jnp.float64), normal(1, 50, 3, 8, dtype=jnp.float64)
    v = jnp.broadcast_to(jnp.eye(50)[:, None], (50, 3, 50)).astype(jnp.float64)
    full = dot_product_attention(q, k, v)
    dropped = dot_product_attention(q, k, v, dropout=0.25, dropout_rng=jax.random.key(5))
    kept = dropped != 0
    np.testing.assert_allclose(dropped[kept], full[kept] / 0.75, rtol=1e-12)
    # 6000 entries: the share kept has the standard deviation 0.0056.
    assert abs(float(kept.mean()) - 0.75) < 0.03


def test_dropout_of_logits_keeps_masked_keys_hidden():
    q, k, v, pre, post = heads_of_three_counts()
    mask = jnp.arange(7) < 5

    def run(v, rng):
        return talking_heads_attention(
            q, k, v, pre, post, mask=mask, dropout=(0.5, 0.0), dropout_rng=rng
        )

    hidden = jnp.where(mask, 0.0, 1e6)[:, None, None]
    one = run(v, jax.random.key(1))
    np.testing.assert_array_equal(one, run(v + hidden, jax.random.key(1)))
    assert not np.allclose(one, run(v, jax.random.key(2)))


def test_forward_mode_and_second_derivatives_of_the_plain_path(x64):
    args = tuple(heads_of_three_counts(t=3, s=4, dtype=jnp.float64))
    mask = jnp.ones((3, 4), bool).at[1].set(False)

    def f(*args):
        return talking_heads_attention(*args, mask=mask)

    check_grads(f, args, order=2, modes=("fwd", "rev"), rtol=1e-5, atol=1e-6)


GOOD = {"q": (2, 6, 3, 4), "k": (2, 7, 3, 4), "v": (2, 7, 2, 6), "pre": (3, 5), "post": (5, 2)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": (6, 4)}, "q has shape (6, 4): give it (..., length, heads, width)"),
        ({"k": (3, 7, 3, 4)}, "k has leading axes (3,) while q has (2,)"),
        ({"k": (2, 7, 2, 4)}, "k has (heads, width) (2, 4) while q has (3, 4)"),
        ({"v": (2, 8, 2, 6)}, "v has length 8 while k has 7"),
        ({"pre": (5, 3)}, "pre has shape (5, 3) while q has 3 heads: its first axis must be 3"),
        ({"pre": (3, 5, 1)}, "pre has shape (3, 5, 1): give a matrix"),
        ({"post": (2, 5)}, "give post the shape (5, 2)"),
        ({"post": None}, "v has 2 heads while the softmax has 5: give post of shape (5, 2)"),
        ({"pre": None, "post": None}, "v has 2 heads while the softmax has 3"),
    ],
)
def test_shape_errors(change, words):
    shapes = GOOD | change
    args = [None if s is None else jnp.zeros(s) for s in shapes.values()]
    with pytest.raises(UsageError) as error:
        ops.talking_heads_attention(*args)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mask": jnp.ones((6, 7))}, "mask is float32: give a boolean mask"),
        (
            {"mask": jnp.ones((6, 6), bool)},
            "mask of shape (6, 6) does not broadcast to (2, 5, 6, 7)",
        ),
        ({"mask": jnp.ones((3, 2, 5, 6, 7), bool)}, "does not broadcast to (2, 5, 6, 7)"),
        ({"bias": jnp.ones((3, 6, 7))}, "bias of shape (3, 6, 7) does not broadcast"),
        ({"bias": jnp.ones((6, 7), int)}, "bias is int32: cast it to a floating dtype"),
        ({"block_size": 0}, "block_size=0: give a whole number of queries, at least 1"),
        ({"dropout": 1.0}, "dropout=1.0: give one rate for the weights"),
        ({"dropout": 0.5}, "dropout=0.5 with dropout_rng=None: pass a key"),
        (
            {"dynamic_pre": DynamicMixing(query=jnp.ones((2, 6, 3, 4)))},
            "dynamic_pre.query has shape (2, 6, 3, 4): give it the shape (2, 6, 3, 5)",
        ),
    ],
)
def test_option_errors(options, words):
    args = [jnp.zeros(s) for s in GOOD.values()]
    with pytest.raises(UsageError) as error:
        ops.talking_heads_attention(*args, **options)
    assert words in str(error.value)


def test_dynamic_terms_need_a_static_projection():
    x = jnp.zeros((2, 6, 3, 4))
    dynamic = DynamicMixing(memory=jnp.ones((2, 6, 3, 3)))
    with pytest.raises(UsageError, match=r"dynamic_post\.memory is given while post=None"):
        ops.talking_heads_attention(x, x, x, dynamic_post=dynamic)


def test_dtype_errors():
    x = jnp.zeros((2, 6, 3, 4))
    with pytest.raises(UsageError, match="k is bfloat16 while q is float32: cast them"):
        ops.dot_product_attention(x, x.astype(jnp.bfloat16), x)
    with pytest.raises(UsageError, match="q is int32: cast it to a floating dtype"):
        ops.dot_product_attention(x.astype(int), x, x)
