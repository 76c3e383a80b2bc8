"""Attention in blocks: golden cases, equal to the plain path, lighter, and where it may run."""

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from jax_extractor import ops
from jax_extractor.ops import DynamicMixing
from jax_extractor.ops.attention_inputs import Inputs, Sizes
from jax_extractor.ops.blocked_attention import Plan, choose_block_size
from jax_extractor.ops.blocks import Group

pytestmark = pytest.mark.core

attend = jax.jit(ops.talking_heads_attention, static_argnames=("causal", "block_size", "dropout"))
GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "talking_heads.npz")
CASES = sorted({key.split("/")[0] for key in GOLDEN})


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def inputs(t, s, *, batch=(2,), heads=(3, 5, 2), dtype=jnp.float32):
    """q, k, v, pre, post and a bias per head and key."""
    key_heads, softmax_heads, value_heads = heads
    shapes = [
        (*batch, t, key_heads, 4),
        (*batch, s, key_heads, 4),
        (*batch, s, value_heads, 6),
        (key_heads, softmax_heads),
        (softmax_heads, value_heads),
        (softmax_heads, 1, s),
    ]
    return tuple(normal(n, *shape, dtype=dtype) for n, shape in enumerate(shapes))


def value_and_gradients(loss, *args):
    return jax.jit(jax.value_and_grad(loss, tuple(range(len(args)))))(*args)


@pytest.mark.parametrize("block_size", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_golden(case, block_size, x64):
    g = {key.split("/")[1]: GOLDEN[key] for key in GOLDEN if key.startswith(f"{case}/")}
    o = attend(
        *(jnp.asarray(g[n]) for n in "qkv"),
        *(jnp.asarray(g[n]) if n in g else None for n in ("pre", "post")),
        mask=jnp.asarray(g["mask"]),
        causal="causal" in case,  # the mask says the same; both must hold at once
        block_size=block_size,
    )
    np.testing.assert_allclose(o, g["out"], rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("t", "s", "block_size", "causal", "dynamic"),
    [
        (6, 9, 2, True, False),
        (9, 6, 2, True, True),
        (8, 8, 3, True, False),
        (7, 11, 4, False, True),
        (5, 1, 2, False, False),
    ],
)
def test_value_and_all_gradients_are_those_of_the_plain_path(
    t, s, block_size, causal, dynamic, x64
):
    args = inputs(t, s, dtype=jnp.float64)
    mask = normal(7, 2, 1, t, s) > -0.7
    cotangent = normal(8, 2, t, 2, 6, dtype=jnp.float64)
    shapes = [(2, t, 3, 5), (2, s, 3, 5), (2, t, 5, 2), (2, s, 5, 2)]
    terms = [normal(10 + n, *x, dtype=jnp.float64) for n, x in enumerate(shapes)]
    scale = jnp.asarray(0.4, jnp.float64)

    def run(block_size):
        def loss(q, k, v, pre, post, bias, scale, *terms):
            options = {}
            if terms:
                options["dynamic_pre"] = DynamicMixing(*terms[:2])
                options["dynamic_post"] = DynamicMixing(*terms[2:])
            o = ops.talking_heads_attention(
                q,
                k,
                v,
                pre,
                post,
                bias=bias,
                scale=scale,
                mask=mask,
                causal=causal,
                block_size=block_size,
                **options,
            )
            return jnp.sum(o * cotangent)

        return value_and_gradients(loss, *args, scale, *(terms if dynamic else []))

    for blocked, plain in zip(
        jax.tree.leaves(run(block_size)), jax.tree.leaves(run(t)), strict=True
    ):
        size = float(abs(plain).max())
        np.testing.assert_allclose(blocked, plain, rtol=1e-11, atol=1e-13 * max(size, 1))


@pytest.mark.parametrize(("pre", "post"), [(False, False), (True, False), (False, True)])
def test_either_mixing_may_be_absent(pre, post):
    q, k, v, p, _, _ = inputs(9, 9, heads=(4, 4, 4))

    def run(block_size):
        def loss(q, k, v, p):
            mixings = (p if pre else None, p.T if post else None)
            o = ops.talking_heads_attention(q, k, v, *mixings, causal=True, block_size=block_size)
            return jnp.sum(jnp.sin(o))

        return jax.tree.leaves(value_and_gradients(loss, q, k, v, p))

    for blocked, plain in zip(run(4), run(9), strict=True):
        np.testing.assert_allclose(blocked, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(5, 6, 9), (6, 1), (2, 1, 6, 9)])
def test_a_bias_of_any_broadcast_shape_gets_its_gradient(shape, x64):
    q, k, v, pre, post, _ = inputs(6, 9, dtype=jnp.float64)

    def run(block_size):
        def loss(bias):
            o = ops.talking_heads_attention(q, k, v, pre, post, bias=bias, block_size=block_size)
            return jnp.sum(jnp.sin(o))

        return value_and_gradients(loss, normal(9, *shape, dtype=jnp.float64))[1][0]

    np.testing.assert_allclose(run(4), run(6), rtol=1e-10, atol=1e-13)


def test_bfloat16_sums_gradients_in_float32():
    """The gradient of a key sums over 64 queries in 16 blocks: far more than bfloat16 could add."""
    args = inputs(64, 64)[:5]
    low = tuple(x.astype(jnp.bfloat16) for x in args)

    def run(args, block_size):
        def loss(*args):
            o = ops.talking_heads_attention(*args, causal=True, block_size=block_size)
            return jnp.sum(o.astype(jnp.float32))

        return value_and_gradients(loss, *args)[1]

    exact = run(tuple(x.astype(jnp.float32) for x in low), 64)
    for ours, reference in zip(run(low, 4), exact, strict=True):
        assert ours.dtype == jnp.bfloat16
        error = np.linalg.norm(ours.astype(jnp.float32) - reference) / np.linalg.norm(reference)
        assert error < 2**-7


@pytest.mark.slow
def test_dropout_is_the_same_in_the_backward_pass(x64):
    """Numerical derivatives of the forward pass see its dropped entries; the gradient must too."""
    q, k, v, pre, post, bias = inputs(5, 5, batch=(), dtype=jnp.float64)

    def f(q, k, v, pre, post, bias):
        return ops.talking_heads_attention(
            q,
            k,
            v,
            pre,
            post,
            bias=bias,
            block_size=2,
            dropout=(0.3, 0.4),
            dropout_rng=jax.random.key(3),
        )

    check_grads(
        jax.jit(f), (q, k, v, pre, post, bias), order=1, modes=("rev",), rtol=1e-6, atol=1e-6
    )


def test_dropout_drops_at_its_rate_in_every_tile():
    """With one-hot values and one logit for all, the output shows the kept weights."""
    q = jnp.zeros((40, 1, 4))
    v = jnp.eye(40)[:, None]
    o = attend(q, q, v, block_size=8, dropout=(0.0, 0.25), dropout_rng=jax.random.key(5))[:, 0]
    np.testing.assert_allclose(o[o != 0], 1 / 40 / 0.75, rtol=1e-5)
    tiles = np.asarray(o != 0).reshape(5, 8, 5, 8).transpose(0, 2, 1, 3).reshape(25, 64)
    # Standard deviations: 0.011 of 1600 entries, 0.054 of 64.
    assert abs(tiles.mean() - 0.75) < 0.05
    assert abs(tiles.mean(1) - 0.75).max() < 0.25
    assert len(np.unique(tiles, axis=0)) == 25


@pytest.mark.slow
def test_vmap_over_an_axis_outside_the_batch(x64):
    q, k, v, pre, post, _ = inputs(7, 7, batch=(3,), dtype=jnp.float64)

    def loss(q, k, v, pre):
        return jnp.sum(
            jnp.sin(ops.talking_heads_attention(q, k, v, pre, post, causal=True, block_size=3))
        )

    together = jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2, 3)), (0, 0, 0, None)))(q, k, v, pre)
    one = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
    for n in range(3):
        for a, b in zip(together, one(q[n], k[n], v[n], pre), strict=True):
            np.testing.assert_allclose(a[n], b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("axes", [(8, 1), (2, 4)])
def test_sharded_over_batch_and_heads(axes):
    """The same values and gradients on eight devices, which keep their shares of the output."""
    args = inputs(12, 12, batch=(8,), heads=(8, 8, 8))[:5]
    mesh = jax.make_mesh(axes, ("data", "heads"), axis_types=(AxisType.Auto,) * 2)
    on_batch = NamedSharding(mesh, P("data", None, "heads", None))
    shardings = (*(on_batch,) * 3, NamedSharding(mesh, P()), NamedSharding(mesh, P()))

    def run(*args):
        def loss(*args):
            o = ops.talking_heads_attention(*args, causal=True, block_size=5)
            return jnp.sum(jnp.sin(o)), o

        return jax.grad(loss, (0, 1, 2, 3, 4), has_aux=True)(*args)

    expected = jax.jit(run)(*args)
    sharded = jax.jit(run, out_shardings=(shardings, on_batch))(
        *(jax.device_put(x, s) for x, s in zip(args, shardings, strict=True))
    )
    assert len({str(s.index) for s in sharded[1].addressable_shards}) == 8
    for a, b in zip(jax.tree.leaves(sharded), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_batch_sharding_needs_no_communication_forward():
    args = inputs(12, 12, batch=(8,), heads=(4, 4, 4))[:5]
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    data, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    placed = [
        jax.device_put(x, s) for x, s in zip(args, (data, data, data, whole, whole), strict=True)
    ]
    program = attend.lower(*placed, causal=True, block_size=4).compile().as_text()
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert collective not in program


def test_memory_is_a_fraction_of_the_plain_path():
    """Compiled, not run: temporary bytes of forward and backward at 1024 queries and 8 heads."""
    x = jax.ShapeDtypeStruct((1, 1024, 8, 16), jnp.float32)
    p = jax.ShapeDtypeStruct((8, 8), jnp.float32)

    def temporary(block_size):
        def loss(*args):
            o = ops.talking_heads_attention(*args, causal=True, block_size=block_size)
            return jnp.sum(o**2)

        program = jax.jit(jax.grad(loss, (0, 1, 2, 3, 4))).lower(x, x, x, p, p).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temporary(64) * 8 < temporary(1024)


@pytest.mark.parametrize("hidden", [-1e9, float(np.finfo(np.float32).min), 1e9])
def test_rows_far_from_zero_keep_their_gradients(hidden):
    """Additive masks over whole rows: the softmax is that of the other terms, however far away."""
    q, k, v, *_ = inputs(6, 6, heads=(2, 2, 2))
    bias = jnp.zeros((6, 6)).at[2].set(hidden)

    def gradients(block_size):
        attend = partial(ops.dot_product_attention, block_size=block_size)
        loss = lambda q, k, v, bias: jnp.sum(jnp.sin(attend(q, k, v, bias=bias)))  # noqa: E731
        return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(q, k, v, bias)

    for blocked, plain in zip(gradients(2), gradients(6), strict=True):
        np.testing.assert_allclose(blocked, plain, rtol=1e-5, atol=1e-6)


def test_groups_hold_every_block_once_with_all_that_it_may_see():
    for t, s, block in [(8, 8, 2), (7, 9, 3), (9, 4, 2), (5, 12, 4), (64, 64, 4)]:
        plan = Plan(block, t, s, True, (0.0, 0.0), Inputs(*[None] * 7), None)
        rows = [i for group in plan.groups for i in range(group.start, group.stop)]
        assert rows == list(range(plan.rows))
        for group in plan.groups:
            sees = min(group.stop * block, t) + s - t
            assert max(sees, 1) <= group.width <= s
        everything = dataclasses.replace(plan, causal=False).groups
        assert everything == [Group(0, plan.rows, s)]


def test_most_of_the_masked_half_is_left_out():
    plan = Plan(4, 64, 64, True, (0.0, 0.0), Inputs(*[None] * 7), None)
    pairs = sum((group.stop - group.start) * 4 * group.width for group in plan.groups)
    assert pairs == 64 * 64 * (1 + 1 / len(plan.groups)) / 2


def test_blocks_are_chosen_where_they_pay():
    small = Sizes((2,), 64, 64, 8, 8, 8)
    large = Sizes((1,), 4096, 4096, 8, 8, 8)
    assert choose_block_size(small) >= 64
    assert choose_block_size(large) < 4096
