"""Fair timing of competing programs: compiled first, then run in turns, medians reported."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import jax

from jax_extractor.errors import UsageError


@dataclass(frozen=True)
class Contestant:
    """A program ready to run: `call()` returns when its results are there."""

    name: str
    call: Callable[[], object]
    compile_seconds: float | None = None
    temporary_bytes: int | None = None


def compile_contestant(name: str, f: Callable, *args) -> Contestant:
    """f(*args) compiled by JAX, with the time it took and the temporary memory it needs."""
    lowered = jax.jit(f).lower(*args)
    start = time.perf_counter()
    program = lowered.compile()
    seconds = time.perf_counter() - start
    memory = program.memory_analysis()
    return Contestant(
        name,
        lambda: jax.block_until_ready(program(*args)),
        seconds,
        None if memory is None else memory.temp_size_in_bytes,
    )


def check_repeats(repeats: int) -> None:
    """Refuses to take the median of nothing."""
    if repeats < 1:
        raise UsageError(f"repeats={repeats}: choose at least 1")


def interleaved_medians(contestants: Sequence[Contestant], repeats: int) -> dict[str, float]:
    """Median seconds by name: one run each to warm up, then `repeats` rounds, all in turn.

    A machine that slows down for a while slows all of them, so ratios stay fair. Every round has an
    order of its own: after a program with much memory the next one runs slower.

    Raises UsageError for repeats below 1.
    """
    check_repeats(repeats)
    for c in contestants:
        c.call()
    seconds: dict[str, list[float]] = {c.name: [] for c in contestants}
    order = random.Random(0)
    for _ in range(repeats):
        for c in order.sample(contestants, len(contestants)):
            start = time.perf_counter()
            c.call()
            seconds[c.name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in seconds.items()}
