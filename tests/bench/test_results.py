"""A bench says before it measures that its file cannot be written, and writes it at the end."""

import importlib.util
import json

import pytest

from jax_extractor.bench.results import check_writable, write_json
from jax_extractor.errors import InputError, UsageError


def test_content_is_written_to_a_folder_that_is_made(tmp_path):
    path = tmp_path / "new" / "bench.json"
    check_writable(path, None)
    write_json(path, {"file": path, "ms": 1.5})
    write_json(None, {})
    assert json.loads(path.read_text()) == {"file": str(path), "ms": 1.5}


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "bench.json", tmp_path):
        with pytest.raises(InputError, match=f"^cannot write {path}: .*; choose another file$"):
            check_writable(path)


def test_a_plot_needs_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_writable(tmp_path / "bench.json")
    with pytest.raises(InputError, match="plot needs matplotlib: pip install"):
        check_writable(None, tmp_path / "bench.png")
    assert not (tmp_path / "bench.png").exists()


def test_two_files_of_known_kinds(tmp_path):
    for rows, plot, message in (
        (None, tmp_path / "bench.zap", "name a file that ends in .png"),
        (tmp_path / "bench.png", tmp_path / "bench.png", "are the same file"),
    ):
        with pytest.raises(UsageError, match=message):
            check_writable(rows, plot)
