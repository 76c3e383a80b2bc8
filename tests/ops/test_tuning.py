"""The choice of `auto`, and replacing it by a measurement."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_extractor.errors import InputError, UsageError
from jax_extractor.ops import auto, causal_extract
from jax_extractor.ops.auto import choose_method
from jax_extractor.ops.tuning import load_tuning, save_tuning, tune

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch):
    monkeypatch.setattr(auto, "measured", {})


@pytest.mark.parametrize(
    "x, w, method",
    [
        ((32, 256, 128), (256, 128, 128), "spectral"),
        ((2, 4096, 64), (4096, 64, 64), "spectral"),
        ((4, 16, 256), (16, 256, 256), "conv"),
        ((64, 64), (64, 64, 64), "conv"),  # one sequence, no leading axis
        ((32, 64, 128), (64, 128), "toeplitz"),
        ((32, 65, 128), (65, 128), "spectral"),
        ((32, 384, 128), (384,), "toeplitz"),
        ((2, 4096, 64), (4096,), "spectral"),
    ],
)
def test_the_documented_table(x, w, method):
    assert choose_method(x, w) == method


def test_auto_is_the_method_it_names():
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((8, 40, 3), (40, 3, 3)))
    assert choose_method(x.shape, w.shape) == "spectral"
    assert "while" not in jax.jit(causal_extract).lower(x, w).as_text()
    auto.measured[auto.shape_key(x.shape, w.shape, x.dtype)] = "scan"
    chosen = jax.jit(lambda x, w: causal_extract(x, w))
    assert "while" in chosen.lower(x, w).as_text()  # the loop over offsets
    np.testing.assert_array_equal(chosen(x, w), causal_extract(x, w, method="scan"))


def test_tuning_is_measured_stored_and_read_again(tmp_path):
    shapes = (2, 8, 3), (8, 3, 3)
    seconds = tune(*shapes, methods=["scan", "conv"], repeats=1)
    assert set(seconds) == {"scan", "conv"}
    assert min(seconds.values()) > 0
    fastest = min(seconds, key=seconds.get)
    assert choose_method(*shapes) == fastest
    save_tuning(tmp_path / "tuning.json")
    auto.measured.clear()
    load_tuning(tmp_path / "tuning.json")
    assert choose_method(*shapes) == fastest
    assert choose_method((2, 1, 8, 3), (99, 3, 3)) == fastest  # same batch, w cut to T
    assert choose_method(*shapes, platform="tpu") == auto.choose_method(*shapes, platform="tpu")


def test_bad_files_and_methods_are_refused(tmp_path):
    with pytest.raises(UsageError, match="unknown method 'magic'"):
        tune((2, 8, 3), (8, 3, 3), methods=["magic"])
    with pytest.raises(InputError, match="cannot be read"):
        load_tuning(tmp_path / "missing.json")
    broken = tmp_path / "broken.json"
    broken.write_text("[[1]]")
    with pytest.raises(InputError, match="cannot be read"):
        load_tuning(broken)
    good = ["cpu", [1, 2, 3], [2, 3], "float32", "scan"]
    bad = [{}, [good, good[:4]], [good, [*good[:4], "magic"]], [["cpu", "abc", *good[2:]]]]
    before = dict(auto.measured)
    for content in bad:
        broken.write_text(json.dumps(content))
        with pytest.raises(InputError, match=r"broken\.json cannot be read"):
            load_tuning(broken)
    assert auto.measured == before
    with pytest.raises(InputError, match="cannot write"):
        save_tuning(tmp_path)
    with pytest.raises(UsageError, match="repeats=0"):
        tune((2, 8, 3), (8, 3, 3), repeats=0)
    with pytest.raises(UsageError, match="dtype=int32"):
        tune((2, 8, 3), (8, 3, 3), dtype=jnp.int32)
