"""Silence covers Orbax alone."""

import logging
import sys
import types

import pytest

from jax_extractor.training.quiet import (
    abandoned_coroutines,
    quieten_leftovers,
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


def test_only_leftovers_are_silenced(monkeypatch):
    heard = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    quieten_leftovers()
    hook = sys.unraisablehook
    quieten_leftovers()  # again changes nothing
    assert sys.unraisablehook is hook

    def unraisable(error, file=None):
        code = types.SimpleNamespace(co_filename=file)
        owner = types.SimpleNamespace(cr_code=code) if file else None
        return types.SimpleNamespace(exc_value=error, object=owner)

    closed = RuntimeError("Event loop is closed")
    hook(unraisable(closed))
    hook(unraisable(Exception("x"), "/x/orbax/y.py"))
    others = [
        unraisable(closed, "/x/other/y.py"),
        unraisable(RuntimeError("x")),
        unraisable(ValueError("Event loop is closed")),
    ]
    for other in others:
        hook(other)
    assert heard == others
