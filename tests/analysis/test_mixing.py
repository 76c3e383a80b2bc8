"""Mixing matrices are found by name, of unrolled and scanned layers, and drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_extractor.analysis.mixing import mixing_matrices, plot_mixings
from jax_extractor.errors import InputError
from jax_extractor.models import LanguageModel, ModelConfig


def parameters(**fields):
    config = ModelConfig(
        features=8, num_layers=2, num_heads=2, max_length=4, ffn_features=4, **fields
    )
    shapes = jax.eval_shape(
        LanguageModel(config, 5).init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32)
    )
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), shapes)["params"]


def test_finds_every_mixing():
    params = parameters(mixer="talking_heads")
    found = mixing_matrices(params)
    assert set(found) == {
        f"core/layers_{i}/mixer/{which}_mixing" for i in range(2) for which in ("pre", "post")
    }
    expected = params["core"]["layers_1"]["mixer"]["post_mixing"]
    np.testing.assert_array_equal(found["core/layers_1/mixer/post_mixing"], expected)


def test_takes_scanned_layers_apart():
    params = parameters(mixer="talking_heads", scan_layers=True)
    found = mixing_matrices(params)
    stacked = params["core"]["layers"]["mixer"]["pre_mixing"]
    np.testing.assert_array_equal(found["core/layers/mixer/pre_mixing[1]"], stacked[1])
    assert len(found) == 4


def test_draws_a_picture(tmp_path):
    path = tmp_path / "mixings.png"
    assert len(plot_mixings(parameters(mixer="cross_modal"), path)) == 8
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("mixer", "file", "words"),
    [
        ("ishe", "a.png", "the model has no head mixings"),
        ("talking_heads", "missing/a.png", "lies in no folder: make .*missing, or"),
        ("talking_heads", "a.what", "is neither .png nor .svg: name a file that ends so"),
        ("talking_heads", "a", "is neither .png nor .svg"),
        ("talking_heads", "folder.svg", "is a folder: name a file in it"),
    ],
)
def test_refuses(mixer, file, words, tmp_path):
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(InputError, match=words):
        plot_mixings(parameters(mixer=mixer), tmp_path / file)
