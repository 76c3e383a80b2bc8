"""The ways that `bench decode` times give the same tokens, and its files hold what it measured."""

import json

import jax
import numpy as np
import pytest

from jax_extractor.bench.decode import Options, epoch, generate, prepare, run
from jax_extractor.errors import UsageError


@pytest.mark.parametrize("length", [16, 64])
def test_all_ways_generate_the_same_tokens(length):
    w = jax.random.normal(jax.random.key(3), (length, 4, 4)) / (4 * length) ** 0.5
    x = jax.random.normal(jax.random.key(4), (2, 4))
    outputs = {n: generate(f, 3 * length, p, s, x) for n, (f, p, s) in prepare(w, 2).items()}
    past, latest, want = [], np.asarray(x, np.float64), []
    for _ in range(3 * length):
        past.insert(0, latest)
        want.append(sum(a @ b for a, b in zip(past, np.asarray(w, np.float64), strict=False)))
        latest = np.tanh(want[-1]) + 0.1 * np.asarray(x, np.float64)
    for name, got in outputs.items():
        np.testing.assert_allclose(got, want, atol=2e-5, err_msg=name)


def test_epochs_are_the_root_of_the_window():
    assert [epoch(n) for n in (1, 16, 64, 1024, 2048, 4096)] == [1, 4, 8, 32, 32, 64]


def test_results_are_printed_and_written(tmp_path, capsys):
    files = {"json": tmp_path / "decode.json", "plot": tmp_path / "decode.png"}
    rows = run(
        Options((16, 32), (1,), features=4, repeats=1, naive_seconds=0.01, model=False, **files)
    )
    assert [row.length for row in rows] == [16, 32]
    assert json.loads(files["json"].read_text())[1]["streaming"] == rows[1].streaming
    assert files["plot"].read_bytes().startswith(b"\x89PNG")
    assert rows[0].speedup == min(rows[0].naive, rows[0].naive_transposed) / rows[0].streaming
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_sizes_must_be_positive():
    with pytest.raises(UsageError, match="repeats"):
        run(Options(repeats=0))
