"""Streaming extraction against a plain float64 loop, over prompts, paddings, splits and types."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_extractor.errors import UsageError
from jax_extractor.ops import init_stream, plan_stream, stream_prefill, stream_step

pytestmark = pytest.mark.core
FEATURES, OUTPUTS = 3, 2


def reference(x, w, scale, valid):
    """The equation in float64: y_i = c_i sum_k x_{i-k} W_{k+1}, zeros where x is not valid."""
    x = np.where(valid[..., None], np.asarray(x, np.float64), 0)
    w = np.asarray(w, np.float64)
    length, time = w.shape[0], x.shape[-2]
    rows = []
    for i in range(time):
        used = range(min(length, i + 1))
        terms = [x[..., i - k, :] @ w[k] if w.ndim == 3 else x[..., i - k, :] * w[k] for k in used]
        count = sum(valid[..., i - k].astype(int) for k in used)
        factor = 1 / np.sqrt(np.maximum(count, 1)) if scale == "rsqrt" else np.ones_like(count)
        rows.append(sum(terms) * factor[..., None])
    return np.stack(rows, -2)


def case(form, length, batch, time, seed=0, dtype=np.float32):
    """x (*batch, T, D), w and a left-padding `valid` of random lengths."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(length, FEATURES, OUTPUTS)[:form]).astype(dtype) / np.sqrt(length)
    x = rng.normal(size=(*batch, time, FEATURES)).astype(dtype)
    return x, w.astype(dtype), rng


@jax.jit
def steps(plan, state, x, valid):
    """`stream_step` over time: x (*B, T, D) -> y (*B, T, E)."""

    def step(state, arrays):
        y, state = stream_step(plan, state, *arrays)
        return state, y

    arrays = (jnp.moveaxis(x, -2, 0), jnp.moveaxis(valid, -1, 0))
    state, y = jax.lax.scan(step, state, arrays)
    return jnp.moveaxis(y, 0, -2), state


def streamed(x, w, scale, valid, prompt):
    """All outputs: `prompt` vectors by prefill, the others one by one."""
    plan = plan_stream(jnp.asarray(w), scale=scale)
    state = init_stream(plan, x.shape[:-2], features=x.shape[-1])
    x, valid = jnp.asarray(x), jnp.asarray(valid)
    first, state = jax.jit(stream_prefill)(plan, state, x[..., :prompt, :], valid[..., :prompt])
    rest, state = steps(plan, state, x[..., prompt:, :], valid[..., prompt:])
    return np.concatenate([first, rest], -2), state


def assert_close(got, want, tolerance):
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 5, 16, 40])
@pytest.mark.parametrize(("form", "scale"), [(3, None), (3, "rsqrt"), (2, "rsqrt"), (1, None)])
def test_equals_the_sum_from_an_empty_prompt_and_without_end(length, form, scale):
    time = 3 * length + 40
    x, w, _ = case(form, length, (2,), time)
    valid = np.ones((2, time), bool)
    y, state = streamed(x, w, scale, valid, 0)
    assert_close(y, reference(x, w, scale, valid), 3e-6)
    assert int(state.position) < 2 * plan_stream(jnp.asarray(w)).ring


@pytest.mark.slow
@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    length=st.integers(1, 36),
    form=st.integers(1, 3),
    scale=st.sampled_from([None, "rsqrt"]),
    batch=st.sampled_from([(), (1,), (3,), (2, 2)]),
    prompt=st.integers(0, 90),
    seed=st.integers(0, 99),
)
def test_equals_the_sum_after_any_prompt(length, form, scale, batch, prompt, seed):
    time = prompt + 3 * length + 1
    x, w, rng = case(form, length, batch, time, seed)
    padding = rng.integers(0, prompt + 1, size=batch)
    valid = np.arange(time) >= padding[..., None]
    y, _ = streamed(x, w, scale, valid, prompt)
    assert_close(y, reference(x, w, scale, valid), 3e-6)


@pytest.mark.parametrize("form", [3, 2, 1])
def test_float64_is_exact_to_its_rounding(x64, form):
    x, w, _ = case(form, 21, (2,), 100, dtype=np.float64)
    valid = np.arange(100) >= np.array([[0], [7]])
    y, _ = streamed(x, w, "rsqrt", valid, 37)
    assert y.dtype == np.float64
    assert_close(y, reference(x, w, "rsqrt", valid), 1e-13)


def test_bfloat16_is_summed_in_float32():
    x, w, _ = case(3, 24, (2,), 80)
    x, w = jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16)
    valid = np.ones((2, 80), bool)
    y, state = streamed(x, w, None, valid, 20)
    assert y.dtype == jnp.bfloat16
    assert state.pending.dtype == state.inputs.dtype == jnp.float32
    want = reference(x, w, None, valid)
    np.testing.assert_allclose(np.asarray(y, np.float64), want, rtol=2**-8, atol=1e-5)


def test_gaps_in_the_middle_of_a_stream_count_as_zero_vectors():
    x, w, rng = case(3, 19, (3,), 90)
    valid = rng.random((3, 90)) < 0.6
    y, _ = streamed(x, w, "rsqrt", valid, 30)
    assert_close(y, reference(x, w, "rsqrt", valid), 3e-6)


def test_left_padding_changes_nothing():
    x, w, _ = case(3, 20, (1,), 70)
    real = np.ones((1, 70), bool)
    plain, _ = streamed(x, w, "rsqrt", real, 25)
    padded = np.pad(x, [(0, 0), (6, 0), (0, 0)], constant_values=9.0)
    y, _ = streamed(padded, w, "rsqrt", np.pad(real, [(0, 0), (6, 0)]), 31)
    assert_close(y[:, 6:], plain, 1e-6)


def test_one_trace_serves_all_tokens_and_the_state_keeps_its_shapes():
    x, w, _ = case(3, 17, (2,), 70)
    plan = plan_stream(jnp.asarray(w), scale="rsqrt")
    state = init_stream(plan, (2,))
    chex.clear_trace_counter()
    step = jax.jit(chex.assert_max_traces(lambda *a: stream_step(*a), n=1))
    ys = []
    for i in range(70):
        y, after = step(plan, state, jnp.asarray(x[:, i]))
        chex.assert_trees_all_equal_shapes_and_dtypes(state, after)
        state = after
        ys.append(y)
    want = reference(x, w, "rsqrt", np.ones((2, 70), bool))
    assert_close(np.stack(ys, 1), want, 3e-6)


def test_a_prompt_of_one_length_after_another_is_traced_once():
    _, w, _ = case(3, 17, (), 1)
    plan = plan_stream(jnp.asarray(w), scale="rsqrt")
    chex.clear_trace_counter()
    prefill = jax.jit(chex.assert_max_traces(lambda *a: stream_prefill(*a), n=1))
    for real in (3, 24, 17):
        x, _, _ = case(3, 17, (1,), 24, seed=real)
        valid = (np.arange(24) >= 24 - real)[None]
        y, _ = prefill(plan, init_stream(plan, (1,)), jnp.asarray(x), jnp.asarray(valid))
        assert_close(y, reference(x, w, "rsqrt", valid), 3e-6)


def test_the_state_does_not_grow_with_tokens_and_is_of_order_window_times_width():
    plan = jax.eval_shape(plan_stream, jax.ShapeDtypeStruct((1000, 64, 32), jnp.float32))
    state = jax.eval_shape(partial(init_stream, plan, (5,)))
    numbers = sum(leaf.size for leaf in jax.tree.leaves(state))
    assert numbers <= 5 * (1024 + 8) * (64 + 32) + 1
    planned = sum(leaf.size for leaf in jax.tree.leaves(plan))
    assert planned <= 3.2 * 1024 * 64 * 32


def test_layers_are_planned_by_vmap_and_taken_apart_by_scan():
    x, _, rng = case(3, 18, (2,), 60)
    w = jnp.asarray(rng.normal(size=(3, 18, FEATURES, FEATURES)) / 8, jnp.float32)
    plans = jax.vmap(partial(plan_stream, scale="rsqrt"))(w)
    states = jax.vmap(lambda plan: init_stream(plan, (2,)))(plans)

    @jax.jit
    def token(states, x):
        def layer(x, pair):
            y, state = stream_step(pair[0], pair[1], x)
            return y, state

        return jax.lax.scan(layer, x, (plans, states))[::-1]

    states, y = jax.lax.scan(token, states, jnp.moveaxis(jnp.asarray(x), 1, 0))
    want, valid = x, np.ones((2, 60), bool)
    for weights in w:
        want = reference(want, weights, "rsqrt", valid)
    assert_close(jnp.moveaxis(y, 0, 1), want, 1e-5)


def test_vmap_over_streams_equals_batch_axes():
    x, w, _ = case(3, 17, (2,), 60)
    plan, valid = plan_stream(jnp.asarray(w)), np.ones((2, 60), bool)
    states = jax.vmap(lambda _: init_stream(plan))(jnp.arange(2))
    y, _ = jax.vmap(partial(steps, plan))(states, jnp.asarray(x), jnp.asarray(valid))
    assert_close(y, reference(x, w, None, valid), 3e-6)


def test_runs_in_a_while_loop():
    x, w, _ = case(2, 17, (), 50)
    plan, x = plan_stream(jnp.asarray(w)), jnp.asarray(x)

    def body(carry):
        i, state, ys = carry
        y, state = stream_step(plan, state, x[i])
        return i + 1, state, ys.at[i].set(y)

    start = (0, init_stream(plan), jnp.zeros((50, FEATURES)))
    ys = jax.lax.while_loop(lambda c: c[0] < 50, body, start)[2]
    assert_close(ys, reference(x, w, None, np.ones(50, bool)), 3e-6)


@pytest.mark.parametrize("form", [(40, 3, 2), (40, 3), (5, 3, 2)])
def test_an_empty_batch_streams(form):
    plan = plan_stream(jnp.ones(form), scale="rsqrt")
    state = init_stream(plan, (0,))
    y, state = stream_prefill(plan, state, jnp.ones((0, 7, 3)))
    assert y.shape == (0, 7, form[-1])
    y, _ = stream_step(plan, state, jnp.ones((0, 3)))
    assert y.shape == (0, form[-1])


def test_a_state_of_another_plan_is_refused():
    state = init_stream(plan_stream(jnp.ones((4, 3, 2)), scale="rsqrt"), (2,))
    for shape, scale in (((8, 3, 2), "rsqrt"), ((4, 3, 2), None), ((40, 3, 2), "rsqrt")):
        plan = plan_stream(jnp.ones(shape), scale=scale)
        with pytest.raises(UsageError, match=r"not of this .*make it with init_stream"):
            stream_step(plan, state, jnp.ones((2, 3)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p, s: plan_stream(jnp.ones((2, 3)), scale="sqrt"), "scale='sqrt'"),
        (lambda p, s: plan_stream(jnp.ones((2, 3, 4, 5))), r"w has shape \(2, 3, 4, 5\)"),
        (lambda p, s: plan_stream(jnp.ones((0, 3))), r"w has shape \(0, 3\)"),
        (lambda p, s: plan_stream(jnp.ones((2, 3), int)), "w has dtype int32"),
        (lambda p, s: init_stream(plan_stream(jnp.ones(4))), "give features=D"),
        (lambda p, s: init_stream(p, features=4), "features=4"),
        (lambda p, s: stream_step(p, s, jnp.ones((2, 4))), r"x has shape \(2, 4\)"),
        (lambda p, s: stream_step(p, s, jnp.ones((3, 3))), r"x has shape \(3, 3\)"),
        (lambda p, s: stream_step(p, s, jnp.ones((2, 3), int)), "x has dtype int32"),
        (lambda p, s: stream_prefill(p, s, jnp.ones((2, 3))), r"\(\*B, P, D\)"),
        (lambda p, s: stream_step(p, s, jnp.ones((2, 3)), jnp.ones(3, bool)), "valid has shape"),
        (lambda p, s: stream_step(p, s, jnp.ones((2, 3)), jnp.ones(2)), "give bool"),
    ],
)
def test_refusals_name_the_field_and_the_value(call, message):
    plan = plan_stream(jnp.ones((9, 3, 2)))
    state = init_stream(plan, (2,))
    with pytest.raises(UsageError, match=message):
        call(plan, state)


def test_float64_vectors_do_not_pass_a_float32_plan(x64):
    plan = plan_stream(jnp.ones((9, 3, 2), jnp.float32))
    with pytest.raises(UsageError, match="cast x"):
        stream_step(plan, init_stream(plan), jnp.ones(3, jnp.float64))
