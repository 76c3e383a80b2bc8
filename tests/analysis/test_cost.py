import dataclasses

import numpy as np
import pytest

from jax_extractor.analysis.cost import (
    MULTIPLICATIONS,
    Sizes,
    build,
    costs,
    count_parameters,
    extraction_method,
    multiplications,
)
from jax_extractor.errors import UsageError
from jax_extractor.mixers import MIXERS


class Counter:
    """A number without a value that counts its multiplications."""

    multiplied = 0

    def __mul__(self, other):
        Counter.multiplied += 1
        return self

    def __add__(self, other):
        return self


def numbers(*shape):
    array = np.empty(shape, object)
    array.fill(Counter())
    return array


def counted(evaluate) -> int:
    Counter.multiplied = 0
    evaluate()
    return Counter.multiplied


def extract_by_definition(s: Sizes, kernel: tuple[int, ...], projections: int, adjust: bool):
    x, d = numbers(s.length, s.features), s.features
    w = numbers(s.offsets, *kernel)
    for i in range(s.length):
        for j in range(max(0, i - s.offsets + 1), i + 1):
            x[j] @ w[i - j] if len(kernel) == 2 else x[j] * w[i - j]
        for _ in range(projections):
            x[i] @ numbers(d, d)
        if adjust:
            x[i] * x[i]


def attend_by_definition(s: Sizes, key_heads: int, heads: int, value_heads: int, mixed: bool):
    d = s.features
    x = numbers(s.length, d)
    for i in range(s.length):
        for heads_of in (key_heads, key_heads, value_heads, value_heads):
            x[i] @ numbers(d, heads_of * (d // heads_of))
        for _ in range(i + 1):
            for _ in range(key_heads):
                numbers(d // key_heads) @ numbers(d // key_heads)
            if mixed:
                numbers(key_heads) @ numbers(key_heads, heads)
                numbers(heads) @ numbers(heads, value_heads)
            for _ in range(value_heads):
                numbers(d // value_heads) * Counter()


@pytest.mark.parametrize(("length", "max_length"), [(5, None), (3, 5), (7, 3)])
@pytest.mark.parametrize(
    ("name", "kernel", "projections", "adjust"),
    [
        ("she", (4, 4), 1, False),
        ("ishe", (4, 4), 1, False),
        ("he", (4,), 3, True),
        ("we", (4,), 3, True),
        ("me", (), 1, True),
    ],
)
def test_formulas_of_extractors_count_the_definition(
    name, kernel, projections, adjust, length, max_length
):
    s = Sizes(length=length, features=4, num_heads=2, max_length=max_length)
    expected = counted(lambda: extract_by_definition(s, kernel, projections, adjust))
    assert multiplications(name, s) == expected


def test_formulas_of_attention_count_the_definition():
    s = Sizes(length=5, features=4, num_heads=2)
    plain = counted(lambda: attend_by_definition(s, 2, 2, 2, mixed=False))
    assert multiplications("mha", s) == plain
    talking = counted(lambda: attend_by_definition(s, 2, 2, 2, mixed=True))
    assert multiplications("talking_heads", s) == talking
    assert multiplications("cross_modal", s) == 2 * talking
    s = Sizes(length=5, features=4, num_heads=2, key_heads=4, value_heads=1)
    talking = counted(lambda: attend_by_definition(s, 4, 2, 1, mixed=True))
    assert multiplications("talking_heads", s) == talking
    s = Sizes(length=5, features=4, num_heads=2, value_heads=3)  # 3 values of width 1
    talking = counted(lambda: attend_by_definition(s, 2, 2, 3, mixed=True))
    assert multiplications("talking_heads", s) == talking


def test_every_mixer_has_a_formula():
    assert set(MULTIPLICATIONS) == set(MIXERS)


def test_parameters_are_those_of_the_table():
    s = Sizes(length=6, features=8, num_heads=2, max_length=5, key_heads=4, value_heads=2)
    d, length, heads = 8, 5, 2
    expected = {
        "she": (length + 1) * d**2,
        "ishe": (length + 1) * d**2,
        "he": 3 * d**2 + length * d,
        "we": 3 * d**2 + length * heads,
        "me": d**2 + length,
        "mha": 4 * d**2,
        "talking_heads": 4 * d**2 + heads * (4 + 2),
        "cross_modal": 2 * (4 * d**2 + heads * (2 + 2)),
    }
    assert {row.mixer: row.parameters for row in costs(s, measure=False)} == expected


def test_talking_heads_have_a_row_for_each_count_of_value_heads():
    s = Sizes(length=6, features=8, num_heads=4)
    rows = costs(s, ["mha", "talking_heads"], measure=False)
    assert [row.value_heads for row in rows] == [None, 4, 6, 2]
    for row in rows[1:]:
        assert row.parameters == 2 * 8 * (8 + (row.value_heads * (8 // row.value_heads))) + 4 * (
            4 + row.value_heads
        )
    (alone,) = costs(dataclasses.replace(s, value_heads=6), ["talking_heads"], measure=False)
    assert alone == rows[2]
    narrow = costs(Sizes(length=6, features=4, num_heads=4), ["talking_heads"], measure=False)
    assert [row.value_heads for row in narrow] == [4, 2]  # six heads do not share four features


def test_the_method_in_force_is_named():
    s = Sizes(length=6, features=8, num_heads=2)
    methods = {name: extraction_method(build(name, s), s) for name in MIXERS}
    assert methods["mha"] is None and methods["talking_heads"] is None
    known = {"scan", "toeplitz", "conv", "fft", "spectral"}
    assert {methods[name] for name in ("she", "ishe", "he", "we", "me")} <= known


def test_what_is_not_measured_is_absent():
    (row,) = costs(Sizes(length=6, features=8), ["ishe"], measure=False)
    assert (row.forward_ms, row.forward_backward_ms, row.temporary_bytes) == (None,) * 3


def test_measured_rows_keep_their_order_and_relate_to_attention():
    s = Sizes(batch_size=1, length=64, features=16, num_heads=2)
    me, mha = costs(s, ["me", "mha"], repeats=3)
    assert (me.mixer, mha.mixer) == ("me", "mha")
    assert mha.forward_times_mha == 1
    assert me.forward_times_mha == pytest.approx(me.forward_ms / mha.forward_ms)
    assert me.forward_backward_ms > 0
    # attention's scores of the backward pass: at least one (h, t, t) array of float32
    assert mha.temporary_bytes >= 2 * 64 * 64 * 4
    assert count_parameters(build("me", s), s) == me.parameters


@pytest.mark.parametrize(
    ("sizes", "mixers", "message"),
    [
        ({"length": 0}, ["mha"], "length=0: choose at least 1"),
        ({"features": 130}, ["mha"], "features=130 is not divisible by num_heads=8"),
        ({}, ["nha"], "unknown mixer 'nha': choose one of"),
        ({}, [], "mixers is empty"),
    ],
)
def test_bad_sizes_are_named(sizes, mixers, message):
    with pytest.raises(UsageError, match=message):
        costs(Sizes(**sizes), mixers, measure=False)
