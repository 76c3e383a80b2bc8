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
| talking_heads | mha + c·h·(h_k + h_v)                        | 4d² + h·(h_k + h_v)             |
| cross_modal   | 2 · talking_heads (both ways, one sequence)  | 2 · talking_heads               |

These count the definition, term by term; a method that transforms (fft, spectral) does fewer, and
attention that does not skip masked pairs does more, which is why time is measured beside them.
Left out are products of order t·d beside terms of order t·d²: she's adjustment, ishe's factor,
scales, and the softmax.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import flax.linen as nn
import jax
import jax.numpy as jnp

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
    """h_v of talking-heads attention; None: num_heads."""

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

    @property
    def mixing(self) -> int:
        """h·(h_k + h_v), the size of both mixings."""
        key_heads = self.num_heads if self.key_heads is None else self.key_heads
        value_heads = self.num_heads if self.value_heads is None else self.value_heads
        return self.num_heads * (key_heads + value_heads)


def _matrix_extractor(s: Sizes) -> int:
    return (s.extracted + s.length) * s.features**2


def _weight_extractor(projections: int) -> Callable[[Sizes], int]:
    return lambda s: projections * s.length * s.features**2 + (s.extracted + s.length) * s.features


def _attention(s: Sizes) -> int:
    return 4 * s.length * s.features**2 + 2 * s.attended * s.features


def _talking_heads(s: Sizes) -> int:
    return _attention(s) + s.attended * s.mixing


#: Multiplications of a forward pass over one sequence, by the table at the head of this file.
MULTIPLICATIONS: dict[str, Callable[[Sizes], int]] = {
    "she": _matrix_extractor,
    "ishe": _matrix_extractor,
    "he": _weight_extractor(3),
    "we": _weight_extractor(3),
    "me": _weight_extractor(1),
    "mha": _attention,
    "talking_heads": _talking_heads,
    "cross_modal": lambda s: 2 * _talking_heads(s),
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


@dataclass(frozen=True)
class Program:
    """A compiled function with its arguments, and the seconds that its runs took."""

    compiled: jax.stages.Compiled
    arguments: tuple
    seconds: list[float]

    def run(self) -> None:
        """Runs once and notes the time."""
        begin = time.perf_counter()
        jax.block_until_ready(self.compiled(*self.arguments))
        self.seconds.append(time.perf_counter() - begin)


def compile_mixer(mixer: nn.Module, sizes: Sizes) -> tuple[Program, Program, int | None]:
    """(forward, forward+backward, temporary bytes of the latter) on random float32 rows."""
    x_key, init_key = jax.random.split(jax.random.key(0))
    x = jax.random.normal(x_key, (sizes.batch_size, sizes.length, sizes.features), jnp.float32)
    params = jax.jit(mixer.init)(init_key, x)["params"]

    def forward(params: PyTree, x: Array) -> Array:
        return cast(Array, mixer.apply({"params": params}, x))

    def forward_backward(params: PyTree, x: Array) -> tuple[Array, PyTree]:
        y, pullback = jax.vjp(forward, params, x)
        return y, pullback(y)

    programs = [
        Program(jax.jit(function).lower(params, x).compile(), (params, x), [])
        for function in (forward, forward_backward)
    ]
    memory = programs[1].compiled.memory_analysis()
    return programs[0], programs[1], None if memory is None else memory.temp_size_in_bytes


def costs(
    sizes: Sizes, mixers: Sequence[str] = tuple(MIXERS), *, measure: bool = True, repeats: int = 7
) -> list[Cost]:
    """A row for each mixer.

    Measured runs are interleaved: every mixer runs once before any runs again, so that a machine
    that slows down slows all of them; one run of each goes before and does not count.

    Raises UsageError for an unknown mixer or sizes that do not fit.
    """
    sizes.check()
    if repeats < 1:
        raise UsageError(f"repeats={repeats}: choose at least 1")
    if not mixers:
        raise UsageError(f"mixers is empty: choose some of {', '.join(sorted(MIXERS))}")
    for name in mixers:
        if name not in MIXERS:
            raise unknown_name("mixer", name, MIXERS)
    rows = [_formulas(name, sizes) for name in mixers]
    return _measured(rows, sizes, repeats) if measure else rows


def _formulas(name: str, sizes: Sizes) -> Cost:
    mixer = build(name, sizes)
    figure = multiplications(name, sizes)
    return Cost(
        mixer=name,
        parameters=count_parameters(mixer, sizes),
        multiplications=figure,
        multiplications_times_mha=None if figure is None else figure / _attention(sizes),
        method=extraction_method(mixer, sizes),
    )


def _measured(rows: list[Cost], sizes: Sizes, repeats: int) -> list[Cost]:
    compiled = [compile_mixer(build(row.mixer, sizes), sizes) for row in rows]
    for _ in range(1 + repeats):
        for forward, both, _ in compiled:
            forward.run()
            both.run()
    medians = {
        row.mixer: [1e3 * statistics.median(program.seconds[1:]) for program in programs[:2]]
        for row, programs in zip(rows, compiled, strict=True)
    }
    baseline = medians["mha"][0] if "mha" in medians else None
    return [
        dataclasses.replace(
            row,
            forward_ms=medians[row.mixer][0],
            forward_backward_ms=medians[row.mixer][1],
            forward_times_mha=None if baseline is None else medians[row.mixer][0] / baseline,
            temporary_bytes=programs[2],
        )
        for row, programs in zip(rows, compiled, strict=True)
    ]
