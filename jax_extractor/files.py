"""Files that are whole or absent, locks, and one clear line when the disk says no."""

import contextlib
import errno
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from jax_extractor.errors import InputError

try:
    import fcntl
except ImportError:  # not a Unix: two builders may then do the same work twice
    fcntl = None  # type: ignore[assignment]

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_atomic(path: Path, content: str | Iterable[bytes]) -> None:
    """Replaces a file so that at any moment the old or the new content is there, whole.

    Args:
        path: the file, in a folder that exists.
        content: a text, written as UTF-8, or blocks of bytes.

    Raises:
        InputError: the disk is full or the folder cannot be written.
    """
    with writing_errors(path):
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with open(handle, "wb") as file:
                write_blocks(file, [content.encode()] if isinstance(content, str) else content)
            os.chmod(temporary, 0o644)  # mkstemp's mode is for its owner alone
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def write_blocks(file, blocks: Iterable[bytes]) -> None:
    """Writes `blocks` to an open binary file, down to the disk."""
    for block in blocks:
        file.write(block)
    file.flush()
    os.fsync(file.fileno())


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Holds the lock file `path`; the system releases it when the holder dies, however it dies."""
    with open(path, "ab") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def writing_errors(path: Path) -> Iterator[None]:
    """Turns a full or read-only disk into one clear line."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from error


@contextlib.contextmanager
def reading_errors(path: Path) -> Iterator[None]:
    """Turns a file of text that cannot be read into one clear line."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"data.files: cannot read {path} ({reason(error)}): check its path and mode"
        ) from error


def cannot_write(path: Path, error: Exception) -> InputError:
    """The one line for a full or read-only disk: where, why, and what to do."""
    if _error_number(error) in NO_SPACE:
        remedy = "free some space and run the same command again"
    else:
        remedy = "make it writable or choose another --run-dir"
    return InputError(f"cannot write {path}: {reason(error)}; {remedy}")


def reason(error: Exception) -> str:
    """Why the operating system refused, in its own words; else the first line of the error."""
    number = _error_number(error)
    if number:
        return os.strerror(number)
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _error_number(error: Exception) -> int | None:
    """The operating system's number, which TensorStore gives inside its text."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"os_error_code='(\d+)'", str(error))
    return int(found[1]) if found else None
