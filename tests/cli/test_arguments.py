"""Arguments become a dataclass; what does not fit becomes one line."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from jax_extractor.cli.arguments import parse
from jax_extractor.errors import UsageError


@dataclass(frozen=True)
class Inner:
    """Inner fields."""

    rate: float = 0.5
    """A rate."""
    pairs: tuple[tuple[str, float], ...] = ()
    """Pairs."""


@dataclass(frozen=True)
class Outer:
    """Outer fields."""

    name: str
    """A name."""
    kind: Literal["near", "far"] = "near"
    """A kind."""
    size: int | None = None
    """A size."""
    near: float | None = None
    """A distance."""
    loud: bool = False
    """Whether it is loud."""
    inner: Inner = field(default_factory=Inner)


def test_fields_are_read():
    flags = ["--name", "a", "--kind", "far", "--size", "3"]
    flags += ["--inner.rate", "1e-3", "--inner.pairs", "x", "1", "y", "2.5"]
    expected = Outer("a", "far", 3, inner=Inner(1e-3, (("x", 1.0), ("y", 2.5))))
    assert parse(Outer, flags, prog="test") == expected


def test_a_default_is_kept_where_nothing_is_said():
    default = Outer("b", size=4, inner=Inner(0.1))
    assert parse(Outer, ["--kind", "far"], prog="test", default=default) == Outer(
        "b", "far", 4, inner=Inner(0.1)
    )


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--name", "a", "--kind", "middle"], ["kind", "middle", "near", "far"]),
        (
            ["--name", "a", "--size", "three"],
            ["--size 'three' is not a whole number: give one, such"],
        ),
        (["--name", "a", "--near", "x"], ["--near 'x' is not a number: give one, such as 0.01"]),
        (["--name", "a", "--loud", "False"], ["False stands alone: a field is set", "--no-NAME"]),
        (["--name", "a", "--inner.rate", "x y"], ["--inner.rate 'x y' is not a number: give one"]),
        (["--name", "a", "--inner.rat", "1"], ["--inner.rat", "--inner.rate"]),
        (["--name"], ["--name"]),
        ([], ["--name"]),
    ],
)
def test_what_does_not_fit_is_named_in_one_line(flags, words, capfd):
    with pytest.raises(UsageError) as caught:
        parse(Outer, flags, prog="test")
    message = str(caught.value)
    assert "\n" not in message and "  " not in message
    assert not set("╭╮╰╯│─\x1b") & set(message)
    assert "--help" not in message
    for word in words:
        assert word in message, message
    assert capfd.readouterr() == ("", "")


def test_help_shows_fields_with_their_words(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(Outer, ["--help"], prog="test")
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "usage: jax-extractor test" in out
    assert "--inner.rate" in out and "A rate." in out and "{near,far}" in out
