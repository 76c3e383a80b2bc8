"""Silence covers Orbax alone."""

import logging
import sys

import pytest

from jax_extractor.training.quiet import abandoned_coroutines, quieten_orbax


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
