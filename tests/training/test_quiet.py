"""Silence covers Orbax alone."""

import logging
import sys
import types

import pytest

from jax_extractor.training.quiet import (
    abandoned_coroutines,
    quieten_late_writes,
    quieten_orbax,
)


def test_only_orbax_is_silenced():
    quieten_orbax()
    quieten_orbax()  # again changes nothing
    logger = logging.getLogger("absl")
    record = logger.makeRecord("absl", logging.ERROR, "/x/orbax/y.py", 1, "text", (), None)
    other = logger.makeRecord("absl", logging.ERROR, "/x/other/y.py", 1, "text", (), None)
    assert not logger.filter(record)
    assert logger.filter(other)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        assert logger.filter(record)
    finally:
        logger.setLevel(level)


def test_hooks_are_put_back():
    hook, logger = sys.unraisablehook, logging.getLogger("asyncio")
    with abandoned_coroutines():
        assert sys.unraisablehook is not hook and logger.disabled
    with pytest.raises(KeyError), abandoned_coroutines():
        raise KeyError
    assert sys.unraisablehook is hook and not logger.disabled


def test_only_late_writes_are_silenced(monkeypatch):
    heard = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    quieten_late_writes()
    hook = sys.unraisablehook
    quieten_late_writes()  # again changes nothing
    assert sys.unraisablehook is hook
    closed, other, another = (
        types.SimpleNamespace(exc_value=error, object=None)
        for error in (RuntimeError("Event loop is closed"), RuntimeError("x"), ValueError("x"))
    )
    for unraisable in (closed, other, another):
        hook(unraisable)
    assert heard == [other, another]
