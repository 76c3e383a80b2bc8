"""What a mixer costs: parameters, multiplications by formula, measured time and memory.

Sizes are t positions of d features, l offsets, h heads; s = Σ_{i=1..t} min(i, l), which is
t(t+1)/2 for t ≤ l, counts the terms of an extraction, and c = t(t+1)/2 the pairs that causal
attention sees. Multiplications of one layer, forward, one sequence:

| mixer         | multiplications                              | parameters                      |
|---------------|----------------------------------------------|---------------------------------|
| she, ishe     | s·d² + t·d²                                  | (l+1)·d²                        |
| he            | 3t·d² + s·d + t·d                            | 3d² + l·d                       |
| we            | 3t·d² + s·d + t·d                            | 3d² + l·h                       |
| me            | t·d² + s·d + t·d                             | d² + l                          |
| mha           | 4t·d² + 2c·d                                 | 4d²                             |
| talking_heads | (2t·d + c)·(k + v) + c·h·(h_k + h_v)         | 2d·(k + v) + h·(h_k + h_v)      |
| cross_modal   | 2 · talking_heads with h_k = h_v = h         | 2 · talking_heads               |

k = h_k·⌊d/h_k⌋ and v = h_v·⌊d/h_v⌋ are the widths of all keys and all values together: d, where the
heads divide it, and then talking_heads is mha + c·h·(h_k + h_v).

These count the definition, term by term; a method that transforms (fft, spectral) does fewer, and
attention that does not skip masked pairs does more, which is why time is measured beside them.
Left out are products of order t·d beside terms of order t·d²: she's adjustment, ishe's factor,
scales, and the softmax.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from jax_extractor.bench.timing import (
    Contestant,
    check_repeats,
    compile_contestant,
    interleaved_medians,
)
from jax_extractor.errors import UsageError, unknown_name
from jax_extractor.mixers import MIXERS, Extractor, make_mixer
from jax_extractor.ops.extraction import choose_method
from jax_extractor.shapes import Array, PyTree


@dataclass(frozen=True)
class Sizes:
    """The sizes at which mixers are compared."""

    batch_size: int = 4
    """Sequences of a measured call; multiplications are those of one sequence."""
    length: int = 256
    """t, positions of a sequence."""
    features: int = 128
    """d, the width of a row vector."""
    num_heads: int = 8
    """h, read by the mixers that have heads."""
    max_length: int | None = None
    """l, the number of an Extractor's offsets; None: length."""
    key_heads: int | None = None
    """h_k of talking-heads attention; None: num_heads."""
    value_heads: int | None = None
    """h_v of talking-heads attention; None: a row each for h_v = h, 1.5h and 0.5h, as far as
    the features suffice."""

    def check(self) -> None:
        """Raises UsageError naming the first field that does not fit."""
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise UsageError(f"{name}={value}: choose at least 1")

    @property
    def offsets(self) -> int:
        """l."""
        return self.length if self.max_length is None else self.max_length

    @property
    def extracted(self) -> int:
        """s, the number of terms of an extraction."""
        short = min(self.length, self.offsets)
        return short * (short + 1) // 2 + (self.length - short) * self.offsets

    @property
    def attended(self) -> int:
        """c, the number of pairs of causal attention."""
        return self.length * (self.length + 1) // 2


def _matrix_extractor(s: Sizes) -> int:
    return (s.extracted + s.length) * s.features**2


def _weight_extractor(projections: int) -> Callable[[Sizes], int]:
    return lambda s: projections * s.length * s.features**2 + (s.extracted + s.length) * s.features


def _attention(s: Sizes) -> int:
    return 4 * s.length * s.features**2 + 2 * s.attended * s.features


def _talking_heads(s: Sizes) -> int:
    key_heads = s.num_heads if s.key_heads is None else s.key_heads
    value_heads = s.num_heads if s.value_heads is None else s.value_heads
    width = sum(heads * (s.features // heads) for heads in (key_heads, value_heads))
    mixing = s.num_heads * (key_heads + value_heads)
    return (2 * s.length * s.features + s.attended) * width + s.attended * mixing


def _cross_modal(s: Sizes) -> int:
    return 2 * _talking_heads(dataclasses.replace(s, key_heads=None, value_heads=None))


#: Multiplications of a forward pass over one sequence, by the table at the head of this file.
MULTIPLICATIONS: dict[str, Callable[[Sizes], int]] = {
    "she": _matrix_extractor,
    "ishe": _matrix_extractor,
    "he": _weight_extractor(3),
    "we": _weight_extractor(3),
    "me": _weight_extractor(1),
    "mha": _attention,
    "talking_heads": _talking_heads,
    "cross_modal": _cross_modal,
}


def multiplications(name: str, sizes: Sizes) -> int | None:
    """The formula's figure; None for a mixer that has no formula here."""
    return MULTIPLICATIONS[name](sizes) if name in MULTIPLICATIONS else None


@dataclass(frozen=True)
class Cost:
    """One row of the table. times_mha is a share of multi-head attention at the same sizes.

    Milliseconds are medians; temporary_bytes is the peak of the compiled forward+backward pass
    beyond its arguments and results. Both are None where not measured, method for attention.
    """

    mixer: str
    value_heads: int | None
    """h_v of talking-heads attention; None for every other mixer."""
    parameters: int
    multiplications: int | None
    multiplications_times_mha: float | None
    method: str | None
    forward_ms: float | None = None
    forward_backward_ms: float | None = None
    forward_times_mha: float | None = None
    temporary_bytes: int | None = None


def build(name: str, sizes: Sizes) -> nn.Module:
    """The mixer of that name at these sizes."""
    options: dict = {"num_heads": sizes.num_heads, "max_length": sizes.offsets}
    if name == "talking_heads":
        options |= {"key_heads": sizes.key_heads, "value_heads": sizes.value_heads}
    return make_mixer(name, **options)


def count_parameters(mixer: nn.Module, sizes: Sizes) -> int:
    """Counted from the shapes of its initialisation, which is not run."""
    x = jax.ShapeDtypeStruct((1, sizes.length, sizes.features), jnp.float32)
    shapes = jax.eval_shape(mixer.init, jax.random.key(0), x)["params"]
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def extraction_method(mixer: nn.Module, sizes: Sizes) -> str | None:
    """What method="auto" takes at these sizes; None for attention."""
    if not isinstance(mixer, Extractor):
        return None
    features = sizes.features
    forms = {"matrix": (features, features), "scalar": ()}
    w_shape = (min(sizes.offsets, sizes.length), *forms.get(mixer.kernel, (features,)))
    return choose_method((sizes.batch_size, sizes.length, features), w_shape, jnp.float32)


def compile_mixer(mixer: nn.Module, sizes: Sizes, name: str) -> tuple[Contestant, Contestant]:
    """(forward, forward+backward) on random float32 rows, ready to run."""
    x_key, init_key = jax.random.split(jax.random.key(0))
    x = jax.random.normal(x_key, (sizes.batch_size, sizes.length, sizes.features), jnp.float32)
    params = jax.jit(mixer.init)(init_key, x)["params"]

    def forward(params: PyTree, x: Array) -> Array:
        return cast(Array, mixer.apply({"params": params}, x))

    def forward_backward(params: PyTree, x: Array) -> tuple[Array, PyTree]:
        y, pullback = jax.vjp(forward, params, x)
        return y, pullback(y)

    return (
        compile_contestant(f"{name} forward", forward, params, x),
        compile_contestant(f"{name} both", forward_backward, params, x),
    )


def costs(
    sizes: Sizes, mixers: Sequence[str] = tuple(MIXERS), *, measure: bool = True, repeats: int = 7
) -> list[Cost]:
    """A row for each mixer; for talking heads one for each count of value heads, see `Sizes`.

    Measured runs are interleaved: every mixer runs once before any runs again, so that a machine
    that slows down slows all of them; one run of each goes before and does not count.

    Raises UsageError for an unknown mixer or sizes that do not fit.
    """
    sizes.check()
    check_repeats(repeats)
    if not mixers:
        raise UsageError(f"mixers is empty: choose some of {', '.join(sorted(MIXERS))}")
    for name in mixers:
        if name not in MIXERS:
            raise unknown_name("mixer", name, MIXERS)
    entries = [(name, variant) for name in mixers for variant in _variants(name, sizes)]
    rows = [_formulas(name, variant) for name, variant in entries]
    return _measured(rows, [variant for _, variant in entries], repeats) if measure else rows


def _variants(name: str, sizes: Sizes) -> list[Sizes]:
    """The sizes of each row of a mixer."""
    if name != "talking_heads" or sizes.value_heads is not None:
        return [sizes]
    h = sizes.num_heads
    counts = [h, *(n for n in (3 * h // 2, h // 2) if n != h and 1 <= n <= sizes.features)]
    return [dataclasses.replace(sizes, value_heads=count) for count in counts]


def _formulas(name: str, sizes: Sizes) -> Cost:
    mixer = build(name, sizes)
    figure = multiplications(name, sizes)
    return Cost(
        mixer=name,
        value_heads=sizes.value_heads if name == "talking_heads" else None,
        parameters=count_parameters(mixer, sizes),
        multiplications=figure,
        multiplications_times_mha=None if figure is None else figure / _attention(sizes),
        method=extraction_method(mixer, sizes),
    )


def _measured(rows: list[Cost], sizes: list[Sizes], repeats: int) -> list[Cost]:
    compiled = [
        compile_mixer(build(row.mixer, s), s, str(n))
        for n, (row, s) in enumerate(zip(rows, sizes, strict=True))
    ]
    seconds = interleaved_medians([c for pair in compiled for c in pair], repeats)
    times = [tuple(1e3 * seconds[c.name] for c in pair) for pair in compiled]
    baseline = next((t[0] for row, t in zip(rows, times, strict=True) if row.mixer == "mha"), None)
    return [
        dataclasses.replace(
            row,
            forward_ms=forward,
            forward_backward_ms=both,
            forward_times_mha=None if baseline is None else forward / baseline,
            temporary_bytes=backward.temporary_bytes,
        )
        for row, (forward, both), (_, backward) in zip(rows, times, compiled, strict=True)
    ]
