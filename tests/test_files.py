"""Files of a run: whole or not at all, and one line when they cannot be written."""

import errno
import os

import pytest

from jax_extractor.errors import InputError
from jax_extractor.files import cannot_write, write_atomic


def test_replaces_the_text(tmp_path):
    path = tmp_path / "config.json"
    for text in ("first ü\n", "second"):
        write_atomic(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert os.listdir(tmp_path) == ["config.json"]


def test_failure_leaves_the_old_text_alone(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    write_atomic(path, "old")

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=f"^cannot write {path}: No space left on device; free"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["config.json"]


def test_folder_that_is_none(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="Not a directory; make it writable or choose another"):
        write_atomic(tmp_path / "file" / "config.json", "text")
    with pytest.raises(InputError, match="No such file or directory"):
        write_atomic(tmp_path / "missing" / "config.json", "text")


def test_reasons_and_remedies(tmp_path):
    cases = [
        (OSError(errno.EROFS, "?"), "Read-only file system; make it writable or choose another"),
        (ValueError("NOT_FOUND: x [os_error_code='28']"), "No space left on device; free some"),
        (ValueError("one line\nanother"), "one line; make it writable"),
        (ValueError(), "ValueError; make it writable"),
    ]
    for error, expected in cases:
        message = str(cannot_write(tmp_path, error))
        assert message.startswith(f"cannot write {tmp_path}: {expected}")
        assert "\n" not in message
