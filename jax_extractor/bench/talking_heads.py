"""jax-extractor bench talking-heads: causal attention forward and backward, beside its peers.

All take projected q, k, v of shape (B, T, h, D/h) in float32 and give the gradients of all their
inputs:

    MHA, einsum               multi-head attention in plain JAX, all scores at once
    MHA, jax.nn               jax.nn.dot_product_attention
    MHA, ours                 ops.dot_product_attention
    talking heads, einsum     the formula in plain JAX, all scores at once
    talking heads, ours       ops.talking_heads_attention
    talking heads, torch      x-transformers' Attend with both mixings (extra "peers")

The two that hold all scores of talking heads are only run up to `longest_naive` queries; beyond,
the einsum one is still compiled for its memory.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from jax_extractor.bench.results import check_writable, write_json
from jax_extractor.bench.timing import (
    Contestant,
    check_repeats,
    compile_contestant,
    interleaved_medians,
)
from jax_extractor.errors import UsageError
from jax_extractor.ops import dot_product_attention, talking_heads_attention
from jax_extractor.shapes import Array

Size = tuple[int, int, int, int]

PLAIN, LIBRARY, OURS = "MHA, einsum", "MHA, jax.nn", "MHA, ours"
NAIVE_TALKING, OUR_TALKING = "talking heads, einsum", "talking heads, ours"
TORCH_TALKING = "talking heads, torch"


@dataclass(frozen=True)
class Options:
    """Sizes of the measurement, and where its results go."""

    sizes: tuple[Size, ...] = ((2, 1024, 512, 8), (1, 4096, 512, 8))
    """Batch, time, features, heads; several one after the other."""
    repeats: int = 5
    block_size: int | None = None
    """Queries per block of ours; by default it chooses."""
    longest_naive: int = 2048
    """The longest sequence that naive and torch talking heads are run on."""
    json: Path | None = None
    plot: Path | None = None


@dataclass(frozen=True)
class Row:
    """One program at one size; None where it was not run, or cannot be known."""

    size: Size
    name: str
    milliseconds: float | None
    temporary_megabytes: float | None
    compile_seconds: float | None


@dataclass(frozen=True)
class Ratio:
    """A quotient of two rows, in the words of its title."""

    size: Size
    title: str
    value: float


def run(options: Options) -> None:
    """Measures every size, prints the table and the ratios, writes the files asked for."""
    for size in options.sizes:
        if len(size) != 4 or min(size) < 1 or size[2] % size[3]:
            raise UsageError(
                f"sizes={size} (batch, time, features, heads): give positive numbers, "
                "features divisible by heads"
            )
    check_repeats(options.repeats)
    check_writable(options.json, options.plot)
    rows, ratios = [], []
    for size in options.sizes:
        measured = measure(size, options)
        print(f"(B, T, D, heads) = {size}, causal, forward + backward, float32")
        print(f"  {'':<24}{'ms':>9}{'temporary MB':>14}{'compile s':>11}")
        for row in measured:
            columns = (row.milliseconds, row.temporary_megabytes, row.compile_seconds)
            ms, mb, s = ("–" if x is None else f"{x:.1f}" for x in columns)
            print(f"  {row.name:<24}{ms:>9}{mb:>14}{s:>11}")
        of_size = compare(measured)
        for ratio in of_size:
            print(f"  {ratio.value:6.2f}  {ratio.title}")
        rows += measured
        ratios += of_size
    content = {"rows": [asdict(r) for r in rows], "ratios": [asdict(r) for r in ratios]}
    write_json(options.json, content)
    if options.plot is not None:
        plot(rows, options.plot)


def measure(size: Size, options: Options) -> list[Row]:
    """Every program at one size, run in turns."""
    batch, time, features, heads = size
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (batch, time, heads, features // heads)) for key in keys)
    mixing = jnp.eye(heads) + 0.1
    plain = partial(dot_product_attention, causal=True, block_size=options.block_size)
    talking = partial(talking_heads_attention, causal=True, block_size=options.block_size)
    functions: dict[str, tuple[Callable, tuple[Array, ...]]] = {
        PLAIN: (einsum_attention, (q, k, v)),
        LIBRARY: (partial(jax.nn.dot_product_attention, is_causal=True), (q, k, v)),
        OURS: (plain, (q, k, v)),
        NAIVE_TALKING: (einsum_attention, (q, k, v, mixing, mixing)),
        OUR_TALKING: (talking, (q, k, v, mixing, mixing)),
    }
    contestants = [
        compile_contestant(name, _gradients(f, len(args)), *args)
        for name, (f, args) in functions.items()
    ]
    runnable = [c for c in contestants if c.name != NAIVE_TALKING or time <= options.longest_naive]
    if time <= options.longest_naive:
        torch = torch_contestant(q, k, v, mixing)
        if torch is not None:
            contestants.append(torch)
            runnable.append(torch)
    seconds = interleaved_medians(runnable, options.repeats)
    return [
        Row(
            size,
            c.name,
            seconds[c.name] * 1e3 if c.name in seconds else None,
            None if c.temporary_bytes is None else c.temporary_bytes / 1e6,
            c.compile_seconds,
        )
        for c in contestants
    ]


def compare(rows: list[Row]) -> list[Ratio]:
    """What the measurement is for, as quotients; those whose rows were measured."""
    by_name = {row.name: row for row in rows}
    ratios = []
    for field, over, under, title in (
        ("milliseconds", OUR_TALKING, PLAIN, "our talking heads' time / plain MHA's"),
        ("milliseconds", OUR_TALKING, OURS, "our talking heads' time / our MHA's"),
        ("milliseconds", OURS, PLAIN, "our MHA's time / plain MHA's"),
        ("milliseconds", OURS, LIBRARY, "our MHA's time / jax.nn's"),
        ("milliseconds", NAIVE_TALKING, OUR_TALKING, "naive talking heads' time / ours"),
        ("milliseconds", TORCH_TALKING, OUR_TALKING, "torch talking heads' time / ours"),
        ("temporary_megabytes", NAIVE_TALKING, OUR_TALKING, "naive talking heads' memory / ours"),
    ):
        a, b = (getattr(by_name[n], field) if n in by_name else None for n in (over, under))
        if a is not None and b is not None:
            ratios.append(Ratio(rows[0].size, title, a / b))
    return ratios


def einsum_attention(
    q: Array, k: Array, v: Array, pre: Array | None = None, post: Array | None = None
) -> Array:
    """Causal attention as everybody writes it, with both mixings or none."""
    causal = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    if pre is not None:
        logits = jnp.einsum("bgqk,gh->bhqk", logits, pre)
    weights = jax.nn.softmax(jnp.where(causal, logits, -1e30))
    if post is not None:
        weights = jnp.einsum("bgqk,gh->bhqk", weights, post)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def torch_contestant(q: Array, k: Array, v: Array, mixing: Array) -> Contestant | None:
    """x-transformers' attention with the same inputs, or None where it is not installed."""
    try:
        import torch
        from x_transformers.attend import Attend
    except ImportError:
        return None
    heads = q.shape[2]
    attend = Attend(heads=heads, causal=True, pre_talking_heads=True, post_talking_heads=True)
    # Its first mixing is added to its input, and its convolutions hold (heads out, heads in, 1, 1).
    static = torch.tensor(jax.device_get(mixing)).T[:, :, None, None]
    with torch.no_grad():
        attend.pre_softmax_talking_heads.weight.copy_(static - torch.eye(heads)[:, :, None, None])
        attend.post_softmax_talking_heads.weight.copy_(static)
    inputs = [torch.tensor(jax.device_get(x)).transpose(1, 2).contiguous() for x in (q, k, v)]

    def call():
        leaves = [x.clone().requires_grad_() for x in inputs]
        attend.zero_grad()
        out, _ = attend(*leaves)
        (out**2).sum().backward()

    return Contestant(TORCH_TALKING, call)


def _gradients(f: Callable, count: int) -> Callable:
    """The gradients of the sum of squares of f's output in all its arguments."""
    return jax.grad(lambda *args: jnp.sum(f(*args) ** 2), tuple(range(count)))


def plot(rows: list[Row], path: Path) -> None:
    """Bars of time and of temporary memory, one group a size, on logarithmic axes."""
    from matplotlib.figure import Figure

    sizes = list(dict.fromkeys(row.size for row in rows))
    names = list(dict.fromkeys(row.name for row in rows))
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, field, label in zip(
        axes, ("milliseconds", "temporary_megabytes"), ("ms", "temporary MB"), strict=True
    ):
        for n, name in enumerate(names):
            values = {row.size: getattr(row, field) for row in rows if row.name == name}
            bars = [(i + n / (len(names) + 1), values.get(s)) for i, s in enumerate(sizes)]
            known = [(x, y) for x, y in bars if y is not None]
            if known:
                axis.bar(*zip(*known, strict=True), width=0.9 / (len(names) + 1), label=name)
        axis.set_xticks([i + 0.35 for i in range(len(sizes))], [str(s) for s in sizes])
        axis.set(xlabel="(batch, time, features, heads)", ylabel=label, yscale="log")
    axes[0].legend(fontsize="small")
    figure.savefig(path)
