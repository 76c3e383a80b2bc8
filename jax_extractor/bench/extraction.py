"""jax-extractor bench extraction: the extraction sum, all our methods beside all peers.

A matrix per offset, L = T and D = E. Every program of one size runs in turn with all others of that
size: forward alone, and forward with the gradients of sum(y^2) in x and w. Peers are
flax.linen.Conv, lax.conv, the one-liner with jnp.fft, and, where torch is installed, its Conv1d and
its FFT. The device's own peaks, one matrix product and one copy, are measured in the same run: "limit" is
the time that the multiply-adds of our method, or the bytes of its arguments and results, would take
at those peaks.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from jax_extractor.bench.extraction_peers import JAX_PEERS, torch_contestant, torch_peers
from jax_extractor.bench.peaks import Peaks, measure_peaks
from jax_extractor.bench.results import check_writable, write_json
from jax_extractor.bench.timing import (
    Contestant,
    check_repeats,
    compile_contestant,
    interleaved_medians,
)
from jax_extractor.errors import UsageError, unknown_name
from jax_extractor.ops.auto import choose_method
from jax_extractor.ops.extraction import METHODS, causal_extract
from jax_extractor.ops.spectral_plan import multiplications, saved_multiplications

Size = tuple[int, int, int]

AUTO = "ours, auto"
PRECISIONS = {"float32": "float32", "tf32": "tensorfloat32", "bfloat16": None}


@dataclass(frozen=True)
class Options:
    """Sizes of the measurement, and where its results go."""

    sizes: tuple[Size, ...] = ((32, 256, 128), (4, 512, 256), (8, 1024, 128), (2, 4096, 64))
    """Batch, time (and offsets), features; several one after the other."""
    growth: Size | None = None
    """Batch, the longest time, features: also measures that time and its halves down to 512."""
    repeats: int = 5
    methods: tuple[str, ...] = ("auto", "spectral", "fft", "conv")
    """Ours; scan and toeplitz can be added, and are slow at these sizes."""
    dtype: str = "float32"
    """float32, tf32 (float32 in reduced precision where the device has it) or bfloat16."""
    json: Path | None = None
    plot: Path | None = None


@dataclass(frozen=True)
class Row:
    """One program at one size. Temporary memory is XLA's own figure, None for other frameworks."""

    size: Size
    name: str
    backward: bool
    milliseconds: float
    temporary_megabytes: float | None


@dataclass(frozen=True)
class Ratio:
    """A quotient of two rows, in the words of its title."""

    size: Size
    title: str
    value: float


def run(options: Options) -> None:
    """Measures every size, prints tables and ratios, writes the files asked for."""
    check(options)
    check_repeats(options.repeats)
    check_writable(options.json, options.plot)
    device = jax.devices()[0].device_kind
    print(f"extraction, {options.dtype}, {jax.default_backend()} ({device}), jax {jax.__version__}")
    dtype = jnp.bfloat16 if options.dtype == "bfloat16" else jnp.float32
    peaks = measure_peaks(dtype, PRECISIONS[options.dtype], options.repeats)
    print(
        f"peaks: {peaks.multiplications / 1e9:.1f} G multiply-adds a second in a matrix product, "
        f"{peaks.bytes / 1e9:.1f} GB a second in a copy"
    )
    rows: list[Row] = []
    swept: list[Row] = []
    ratios: list[Ratio] = []
    for size in options.sizes:
        measured = measure(size, options)
        of_size = compare(measured) + compare_limit(measured, peaks, dtype)
        print_size(size, measured, of_size)
        rows += measured
        ratios += of_size
    if options.growth is not None:
        swept, of_growth = measure_growth(options)
        ratios += of_growth
    content = {
        "dtype": options.dtype,
        "platform": jax.default_backend(),
        "device": device,
        "jax": jax.__version__,
        "peaks": peaks._asdict(),
        "rows": [asdict(row) for row in rows],
        "growth": [asdict(row) for row in swept],
        "ratios": [asdict(ratio) for ratio in ratios],
    }
    write_json(options.json, content)
    if options.plot is not None:
        plot(rows, swept, options.plot)


def check(options: Options) -> None:
    """Refuses sizes, methods and dtypes that do not exist."""
    sizes = [*options.sizes, *([options.growth] if options.growth else [])]
    for size in sizes:
        if len(size) != 3 or min(size) < 1:
            raise UsageError(f"sizes={size} (batch, time, features): give positive numbers")
    for method in options.methods:
        if method != "auto" and method not in METHODS:
            raise unknown_name("method", method, ["auto", *METHODS])
    if options.dtype not in PRECISIONS:
        raise unknown_name("dtype", options.dtype, PRECISIONS)


def arrays(size: Size, options: Options):
    """x and w of unit output variance, the same for every program."""
    batch, time, features = size
    dtype = jnp.bfloat16 if options.dtype == "bfloat16" else jnp.float32
    x_key, w_key = jax.random.split(jax.random.key(0))
    x = jax.random.normal(x_key, (batch, time, features), dtype)
    w = jax.random.normal(w_key, (time, features, features), dtype)
    return x, w / jnp.sqrt(jnp.asarray(time * features, dtype))


def contestants(size: Size, options: Options, backward: bool) -> list[Contestant]:
    """Every program of one size, compiled."""
    x, w = arrays(size, options)
    precision = PRECISIONS[options.dtype]
    programs: dict[str, Callable] = {
        f"ours, {method}": functools.partial(causal_extract, method=method, precision=precision)
        for method in options.methods
    }
    if options.dtype != "bfloat16":  # there is no bfloat16 FFT
        programs |= JAX_PEERS
    else:
        programs |= {name: f for name, f in JAX_PEERS.items() if "fft" not in name}
    with jax.default_matmul_precision(precision):
        compiled = [
            compile_contestant(name, gradients(f) if backward else f, x, w)
            for name, f in programs.items()
        ]
    if options.dtype == "float32" and jax.default_backend() == "cpu":
        compiled += [torch_contestant(name, f, x, w, backward) for name, f in torch_peers().items()]
    return compiled


def gradients(f: Callable) -> Callable:
    """The gradients of sum(f(x, w)^2) in both arguments."""
    return jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2), (0, 1))


def measure(size: Size, options: Options) -> list[Row]:
    """Every program at one size, run in turns."""
    rows = []
    for backward in (False, True):
        entered = contestants(size, options, backward)
        seconds = interleaved_medians(entered, options.repeats)
        for c in entered:
            memory = None if c.temporary_bytes is None else c.temporary_bytes / 1e6
            rows.append(Row(size, c.name, backward, seconds[c.name] * 1e3, memory))
    return rows


def compare(rows: list[Row]) -> list[Ratio]:
    """How much faster our auto is than the fastest peer of the run, and than flax.linen.Conv."""
    ratios = []
    for backward, words in ((False, "forward"), (True, "forward + backward")):
        ms = {row.name: row.milliseconds for row in rows if row.backward == backward}
        peers = {name: t for name, t in ms.items() if not name.startswith("ours")}
        if AUTO not in ms or not peers:
            continue
        fastest = min(peers, key=lambda name: peers[name])
        for name, title in ((fastest, f"the fastest peer's ({fastest})"), ("flax.linen.Conv",) * 2):
            if name in peers:
                ratios.append(
                    Ratio(rows[0].size, f"{words}: {title} time / ours", peers[name] / ms[AUTO])
                )
    return ratios


def compare_limit(rows: list[Row], peaks: Peaks, dtype) -> list[Ratio]:
    """Our auto's share of the limit, see the head of this file; both directions.

    The direct methods are counted as the definition, L (L + 1) / 2 products of a sequence.
    """
    (batch, time, features), width = rows[0].size, jnp.dtype(dtype).itemsize
    shapes = (batch, time, features), (time, features, features)
    if choose_method(*shapes, dtype) == "spectral":
        count = multiplications(*shapes)
        counts = {False: count, True: 3 * count - saved_multiplications(*shapes)}
    else:
        count = batch * time * (time + 1) // 2 * features**2
        counts = {False: count, True: 3 * count}
    x_bytes, w_bytes = (math.prod(shape) * width for shape in shapes)
    # Forward reads x and w and writes y. Backward reads w, x and ybar (twice), writes xbar and wbar.
    moved = {False: 2 * x_bytes + w_bytes, True: 6 * x_bytes + 3 * w_bytes}
    ratios = []
    for row in rows:
        if row.name == AUTO:
            limit = peaks.seconds(counts[row.backward], moved[row.backward]) * 1e3
            words = "forward + backward" if row.backward else "forward"
            title = f"{words}: the limit ({limit:.1f} ms) / our time"
            ratios.append(Ratio(row.size, title, limit / row.milliseconds))
    return ratios


def print_size(size: Size, rows: list[Row], ratios: list[Ratio]) -> None:
    """One table: milliseconds of every method and peer, temporary memory, and the quotients."""
    method = choose_method(size, (size[1], size[2], size[2]))
    print(f"\n(B, T, D) = {size}, L = T; auto is {method}")
    print(f"  {'':<18}{'forward':>10}{'+ backward':>12}  ms{'temporary':>12}  MB, with backward")
    names = list(dict.fromkeys(row.name for row in rows))
    for name in names:
        forward, both = sorted((r for r in rows if r.name == name), key=lambda r: r.backward)
        memory = both.temporary_megabytes
        shown = "–" if memory is None else f"{memory:.0f}"
        print(f"  {name:<18}{forward.milliseconds:>10.1f}{both.milliseconds:>12.1f}{shown:>16}")
    for ratio in ratios:
        print(f"  {ratio.value:6.2f}  {ratio.title}")


def measure_growth(options: Options) -> tuple[list[Row], list[Ratio]]:
    """Every program at the longest time and its halves down to 512, and how our auto grows.

    The times that are divided by each other are measured in turns.
    """
    assert options.growth is not None
    batch, longest, features = options.growth
    times = [longest]
    while times[0] // 2 >= 512:
        times.insert(0, times[0] // 2)
    extract = functools.partial(causal_extract, precision=PRECISIONS[options.dtype])
    entered = [
        compile_contestant(str(time), gradients(extract), *arrays((batch, time, features), options))
        for time in times
    ]
    seconds = interleaved_medians(entered, options.repeats)
    ratios = [
        Ratio(
            (batch, b, features),
            f"forward + backward: our time at T={b} / at T={a}",
            seconds[str(b)] / seconds[str(a)],
        )
        for a, b in itertools.pairwise(times)
    ]
    print(f"\ngrowth at B={batch}, D={features}, forward + backward")
    for time in times:
        print(f"  T={time:<6}{seconds[str(time)] * 1e3:>10.1f} ms")
    for ratio in ratios:
        print(f"  {ratio.value:6.2f}  {ratio.title}")
    return [row for t in times for row in measure((batch, t, features), options)], ratios


def plot(rows: list[Row], swept: list[Row], path: Path) -> None:
    """Forward + backward: bars for each size and, where growth was measured, time against T."""
    from matplotlib.figure import Figure

    sizes = list(dict.fromkeys(row.size for row in rows))
    names = list(dict.fromkeys(row.name for row in rows + swept))
    figure = Figure(figsize=(12 if swept else 7, 4.5), layout="constrained")
    axes = figure.subplots(1, 2 if swept else 1, squeeze=False)[0]
    for n, name in enumerate(names):
        times = {row.size: row.milliseconds for row in rows if row.name == name and row.backward}
        places = [sizes.index(size) + n / (len(names) + 1) for size in times]
        axes[0].bar(places, list(times.values()), width=0.9 / (len(names) + 1), label=name)
        points = [(r.size[1], r.milliseconds) for r in swept if r.name == name and r.backward]
        if points:
            axes[1].plot(*zip(*points, strict=True), "o-" if "ours" in name else "s--")
    axes[0].set_xticks([i + 0.4 for i in range(len(sizes))], [str(size) for size in sizes])
    axes[0].set(xlabel="(B, T, D), L = T", ylabel="ms, forward + backward", yscale="log")
    axes[0].legend(fontsize="small")
    if swept:
        batch, _, features = swept[0].size
        axes[1].set(xlabel=f"T = L, at B={batch}, D={features}", xscale="log", yscale="log")
        times_swept = sorted({row.size[1] for row in swept})
        axes[1].set_xticks(times_swept, [str(t) for t in times_swept], minor=False)
        axes[1].set_xticks([], minor=True)
    figure.savefig(path)
