"""Files that are whole or absent: written beside their place and then moved there."""

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from jax_extractor.errors import InputError

try:
    import fcntl
except ImportError:  # not a Unix: two builders may then do the same work twice
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def storage_errors(directory: Path) -> Iterator[None]:
    """Turn a full or read-only disk into one clear line."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write to {directory}: {error.strerror or error}: "
            "free some space or choose another --run-dir"
        ) from error


@contextlib.contextmanager
def reading_errors(path: Path) -> Iterator[None]:
    """Turn a file that cannot be read into one clear line."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"data.files: cannot read {path} ({error.strerror or error}): check its path and mode"
        ) from error


def write_atomically(path: Path, blocks: Iterable[bytes]) -> None:
    """Write `blocks` to `path`; whoever opens it sees all of them or the file from before."""
    with storage_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with open(handle, "wb") as file:
                write_blocks(file, blocks)
            os.chmod(temporary, 0o644)  # mkstemp's mode is for its owner alone
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def write_blocks(file, blocks: Iterable[bytes]) -> None:
    """Write `blocks` to an open binary file, down to the disk."""
    for block in blocks:
        file.write(block)
    file.flush()
    os.fsync(file.fileno())


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; the system releases it when the holder dies, however it dies."""
    with open(path, "ab") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
