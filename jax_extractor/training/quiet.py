"""Keeps Orbax from repeating on standard error, as tracebacks, what is raised here as one line."""

import contextlib
import logging
import os
import sys


def quieten_orbax() -> None:
    """Drops Orbax's log records.

    Other users of absl's logger are left alone; whoever sets its level to INFO sees all again.
    """
    logger = logging.getLogger("absl")
    if _not_orbax not in logger.filters:
        logger.addFilter(_not_orbax)


def _not_orbax(record: logging.LogRecord) -> bool:
    wanted = logging.getLogger("absl").isEnabledFor(logging.INFO)
    return wanted or f"{os.sep}orbax{os.sep}" not in record.pathname


def quieten_leftovers() -> None:
    """Drops what reads and writes say that end, or are thrown away, after one beside them failed.

    TensorStore tells it from threads of its own to an event loop that is closed by then, and
    Python when it collects a coroutine that waited for them: at any moment after the failure.
    """
    hook = sys.unraisablehook
    if getattr(hook, "__name__", "") == "_but_leftovers":
        return

    def _but_leftovers(unraisable) -> None:
        error, code = unraisable.exc_value, getattr(unraisable.object, "cr_code", None)
        closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
        orbax = code is not None and f"{os.sep}orbax{os.sep}" in code.co_filename
        if not (orbax or (closed and unraisable.object is None)):
            hook(unraisable)

    sys.unraisablehook = _but_leftovers


@contextlib.contextmanager
def abandoned_coroutines():
    """What a failed read leaves pending is collected without a word in this block.

    Orbax reads arrays as coroutines of one event loop. When one fails, the others are collected
    after the loop is closed, and each would print a traceback.
    """
    hook, logger = sys.unraisablehook, logging.getLogger("asyncio")
    disabled = logger.disabled
    sys.unraisablehook, logger.disabled = (lambda _: None), True
    try:
        yield
    finally:
        sys.unraisablehook, logger.disabled = hook, disabled
