"""Files of a run, written whole or not at all, with one clear line when the disk says no."""

import errno
import os
import re
import tempfile
from pathlib import Path

from jax_extractor.errors import InputError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_atomic(path: Path, text: str) -> None:
    """Replaces a file's text so that at any moment the old or the new one is there, whole.

    Raises:
        InputError: the disk is full or the folder cannot be written.
    """
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            temporary = file.name
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # a temporary file's mode is for its owner alone
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: Exception) -> InputError:
    """The one line for a full or read-only disk: where, why, and what to do."""
    number = _error_number(error)
    if number in NO_SPACE:
        remedy = "free some space and run the same command again"
    else:
        remedy = "make it writable or choose another --run-dir"
    return InputError(f"cannot write {path}: {reason(error)}; {remedy}")


def _error_number(error: Exception) -> int | None:
    """The operating system's number, which TensorStore gives inside its text."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"os_error_code='(\d+)'", str(error))
    return int(found[1]) if found else None


def reason(error: Exception) -> str:
    number = _error_number(error)
    if number:
        return os.strerror(number)
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
