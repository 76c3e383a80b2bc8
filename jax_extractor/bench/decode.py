"""jax-extractor bench decode: microseconds per token of the extraction sum and of a whole model.

Every way makes its tokens in one `lax.scan` on the device, each token from the one before it
(x' = tanh(y) + x_0/10), so that nothing can be computed ahead:

    naive       one contiguous product per token over a double-length ring, no gather: (B, L*D) by
                (L*D, D), or by the transposed weights, whichever is faster
    epoched     FutureFill's epoched variant (Agarwal et al. 2024), K near sqrt(L): naive among the
                last K tokens, and every K tokens one transform of the whole window for the next K
    streaming   `ops.stream_step`, all L tokens from an empty prompt

The first two cost the same for every token, so a part of the L tokens is enough to time them.
The whole model is described in `decode_model`.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import jax
import jax.numpy as jnp
from jax import lax

from jax_extractor.bench.results import check_writable, write_json
from jax_extractor.errors import UsageError
from jax_extractor.ops import StreamPlan, StreamState, init_stream, plan_stream, stream_step
from jax_extractor.ops.dft import times_i, transform, transposed
from jax_extractor.ops.stream_plan import ceil_power, tile_dft
from jax_extractor.shapes import Array, Float, PyTree

NAMES = ("naive", "naive transposed", "epoched", "streaming")


@dataclass(frozen=True)
class Options:
    """Sizes of the measurement, and where its results go."""

    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    batches: tuple[int, ...] = (1, 8)
    features: int = 128
    repeats: int = 5
    naive_seconds: float = 2.0  # how long one naive run may take; it stops at so many tokens
    model: bool = True  # whether a whole language model is timed too
    model_length: int = 2048
    json: Path | None = None
    plot: Path | None = None


@dataclass(frozen=True)
class Row:
    """Medians in microseconds per token; `speedup` is against the faster naive layout."""

    length: int
    batch: int
    features: int
    naive: float
    naive_transposed: float
    epoched: float
    streaming: float
    largest_stall: float
    speedup: float


def run(options: Options) -> list[Row]:
    """Measures, prints the table, and writes JSON and a plot where asked."""
    if not options.lengths or not options.batches:
        raise UsageError("lengths and batches need at least one number each")
    if not 0 < options.naive_seconds < float("inf"):
        raise UsageError(f"naive_seconds={options.naive_seconds}: choose a time above 0")
    sizes = (*options.lengths, *options.batches, options.features, options.model_length)
    if min(options.repeats, *sizes) < 1:
        raise UsageError("lengths, batches, features and repeats must be at least 1")
    check_writable(options.json, options.plot)
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, float32, D={options.features}")
    print("microseconds per token, medians of interleaved runs")
    head = ("L", "B", "naive", "transposed", "epoched", "streaming", "stall", "naive/streaming")
    print(" ".join(f"{name:>10}" for name in head))
    rows = []
    for batch in options.batches:
        for length in options.lengths:
            row = measure(length, batch, options)
            rows.append(row)
            cells = [row.naive, row.naive_transposed, row.epoched, row.streaming]
            cells = [*cells, row.largest_stall, row.speedup]
            text = " ".join(f"{cell:10.1f}" for cell in cells)
            print(f"{length:>10} {batch:>10} {text}", flush=True)
    results = [asdict(row) for row in rows]
    if options.model:
        results.append(asdict(whole_model(options)))
    write_json(options.json, results)
    if options.plot:
        plot(rows, options.plot)
    return rows


def whole_model(options: Options):
    """The `ModelRow` of a language model at B=1, printed."""
    from jax_extractor.bench.decode_model import ModelSizes, measure_model  # it imports this module

    sizes = ModelSizes(length=options.model_length)
    row = measure_model(sizes, options.repeats, options.naive_seconds)
    print(
        f"whole model, L={row.length}, B={row.batch}, {row.layers} layers, D={row.features}, "
        f"FFN {row.ffn_features}, V={row.vocabulary}: naive {row.naive:.1f}, "
        f"transposed {row.naive_transposed:.1f}, streaming {row.streaming:.1f}, "
        f"naive/streaming {row.speedup:.1f}",
        flush=True,
    )
    return row


def measure(length: int, batch: int, options: Options) -> Row:
    """One row of the table."""
    features = options.features
    keys = jax.random.split(jax.random.key(0))
    w = jax.random.normal(keys[0], (length, features, features)) / (length * features) ** 0.5
    x = jax.random.normal(keys[1], (batch, features))
    ways = prepare(w, batch)
    tokens = {}
    for name, (step, weights, state) in ways.items():
        seconds = timed(generate, step, 16, weights, state, x) / 16
        few = max(16, int(options.naive_seconds / seconds))
        epochs = 2 * epoch(length) if name == "epoched" else 1
        tokens[name] = (
            length if name == "streaming" else min(length, few // epochs * epochs or epochs)
        )
    times: dict[str, list[float]] = {name: [] for name in ways}
    for name, way in ways.items():  # compile
        generate(way[0], tokens[name], *way[1:], x)
    for _ in range(options.repeats):
        for name, way in ways.items():
            seconds = timed(generate, way[0], tokens[name], *way[1:], x)
            times[name].append(seconds / tokens[name] * 1e6)
    naive, across, epoched, streaming = (median(times[name]) for name in NAMES)
    _, plan, state = ways["streaming"]
    return Row(
        length, batch, features, naive, across, epoched, streaming,
        stall(plan, state, x, options.repeats), min(naive, across) / streaming,
    )  # fmt: skip


def prepare(w: Float[Array, "L D D"], batch: int) -> dict[str, tuple]:
    """Each way's step, weights and first state."""
    length, features, _ = w.shape
    rows = w[::-1].reshape(length * features, features)
    ring = jnp.zeros((batch, 2 * length, features))
    plan = jax.jit(plan_stream)(w)
    return {
        "naive": (naive_step, rows, (jnp.zeros((), jnp.int32), ring)),
        "naive transposed": (
            naive_transposed_step, rows.T.copy(), (jnp.zeros((), jnp.int32), ring)
        ),
        "epoched": (epoched_step, epoched_weights(w), epoched_state(length, batch, features)),
        "streaming": (stream_step, plan, init_stream(plan, (batch,))),
    }  # fmt: skip


@partial(jax.jit, static_argnums=(0, 1))
def generate(step: Callable, tokens: int, weights: PyTree, state: PyTree, x: Array) -> Array:
    """`tokens` outputs (tokens, B, D), each input made from the output before it."""

    def body(carry, _):
        state, latest = carry
        y, state = step(weights, state, latest)
        return (state, jnp.tanh(y) + 0.1 * x), y

    return lax.scan(body, (state, x), None, length=tokens)[1]


def naive_step(rows: Float[Array, "LD E"], state: tuple, x: Float[Array, "B D"]):
    """y_n = sum_k x_{n-k} W_{k+1} as one product; the ring is written twice, read once."""
    window, state = ring_window(state, x, rows.shape[0] // x.shape[1])
    return jnp.matmul(window, rows, precision="highest"), state


def naive_transposed_step(columns: Float[Array, "E LD"], state: tuple, x: Float[Array, "B D"]):
    """`naive_step` with the weights stored the other way round."""
    window, state = ring_window(state, x, columns.shape[1] // x.shape[1])
    dims = (((1,), (1,)), ((), ()))
    return lax.dot_general(window, columns, dims, precision=lax.Precision.HIGHEST), state


def ring_window(state: tuple, x: Float[Array, "B D"], length: int):
    """The last L vectors as one contiguous row (B, L*D), oldest first, and the new state."""
    at, ring = state
    ring = lax.dynamic_update_slice_in_dim(ring, x[:, None], at, 1)
    ring = lax.dynamic_update_slice_in_dim(ring, x[:, None], at + length, 1)
    window = lax.dynamic_slice_in_dim(ring, at + 1, length, 1)
    return window.reshape(x.shape[0], -1), ((at + 1) % length, ring)


def epoch(length: int) -> int:
    """K: the power of two nearest to sqrt(L), from below."""
    return 1 << ((length.bit_length() - 1) // 2)


def epoched_weights(w: Float[Array, "L D D"]) -> tuple[Array, Array]:
    """The nearest K offsets for the product, and the whole window's transform."""
    length, features, _ = w.shape
    size = ceil_power(length)
    padded = jnp.pad(w, [(0, size - length), (0, 0), (0, 0)]).reshape(size, -1)
    spectrum = transform(padded / size, tile_dft(size)).reshape(size, 2 * features, features)
    return w[: epoch(length)][::-1].reshape(-1, features), spectrum


def epoched_state(length: int, batch: int, features: int) -> tuple:
    """n, the tokens of this epoch, the last vectors and what is pending for this epoch."""
    k, size = epoch(length), ceil_power(length)
    shapes = [(batch, k, features), (batch, size, features), (batch, k, features)]
    return (jnp.zeros((), jnp.int32), *(jnp.zeros(shape) for shape in shapes))


def epoched_step(weights: tuple, state: tuple, x: Float[Array, "B D"]):
    """FutureFill's epoched step, for a window that slides without end."""
    near, spectrum = weights
    n, recent, past, pending = state
    k = pending.shape[1]

    def fill(carry):
        _, recent, past, _ = carry
        past = jnp.concatenate([past[:, k:], recent], 1)
        return jnp.zeros((), bool), jnp.zeros_like(recent), past, future(spectrum, past, k)

    due = (n == k, recent, past, pending)
    _, recent, past, pending = lax.while_loop(lambda c: c[0], fill, due)
    n = jnp.where(n == k, 0, n)
    recent = jnp.concatenate([recent[:, 1:], x[:, None]], 1)
    y = jnp.matmul(recent.reshape(x.shape[0], -1), near, precision="highest")
    y = y + lax.dynamic_index_in_dim(pending, n, 1, keepdims=False)
    return y, (n + 1, recent, past, pending)


def future(spectrum: Float[Array, "F Q E"], past: Float[Array, "B N D"], k: int) -> Array:
    """What the past leaves to the next k outputs: the second half of the linear convolution."""
    batch, size, features = past.shape
    z = transform(jnp.moveaxis(past, 0, 1).reshape(size, -1), tile_dft(size))
    z = z.reshape(size, 2, batch, features)
    rows = jnp.stack([z, times_i(z)], 3).reshape(size, 2 * batch, 2 * features)
    dims = (((2,), (1,)), ((0,), (0,)))
    out = lax.dot_general(rows, spectrum, dims, precision=lax.Precision.HIGHEST)
    out = times_i(out.reshape(size, 2, batch, -1)).reshape(size, 2, -1)
    y = transposed(out, tile_dft(size)).reshape(size, batch, -1)[:k]
    return jnp.moveaxis(y, 1, 0)


def stall(plan: StreamPlan, state: StreamState, x: Float[Array, "B D"], repeats: int) -> float:
    """Microseconds of the dearest single token: the one that meets the tile of the whole window."""
    state = replace(state, position=jnp.asarray(plan.ring, jnp.int32))
    generate(stream_step, 1, plan, state, x)
    return median(timed(generate, stream_step, 1, plan, state, x) for _ in range(repeats)) * 1e6


def timed(f: Callable, *arguments) -> float:
    """Seconds of one call, compiled before."""
    start = time.perf_counter()
    jax.block_until_ready(f(*arguments))
    return time.perf_counter() - start


def plot(rows: list[Row], path: Path) -> None:
    """Microseconds per token over L, a line for each way, and log^2 L for comparison."""
    import numpy as np
    from matplotlib.figure import Figure

    batches = sorted({row.batch for row in rows})
    figure = Figure(figsize=(5 * len(batches), 4), layout="constrained")
    axes = figure.subplots(1, len(batches), squeeze=False)[0]
    for axis, batch in zip(axes, batches, strict=True):
        chosen = [row for row in rows if row.batch == batch]
        lengths = np.array([row.length for row in chosen])
        for name in ("naive", "naive_transposed", "epoched", "streaming"):
            axis.loglog(lengths, [getattr(row, name) for row in chosen], "o-", label=name)
        square = np.log2(lengths) ** 2
        growth = chosen[0].streaming * square / square[0]
        axis.loglog(lengths, growth, "k:", label="log² L")
        axis.set(xlabel="L", ylabel="µs per token", title=f"B = {batch}, D = {chosen[0].features}")
        axis.set_xticks(lengths, [str(length) for length in lengths], minor=False)
        axis.set_xticks([], minor=True)
        axis.legend()
    figure.savefig(path)
