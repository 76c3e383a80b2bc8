from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jax_extractor.data.tokenizers import BytesTokenizer
from jax_extractor.models import LanguageModel, ModelConfig

LENGTH = 4


def make_writer(mixer: str) -> SimpleNamespace:
    """A bytes model of random parameters, far from uniform: its logits have a deviation well above 1."""
    config = ModelConfig(
        mixer=mixer, features=16, num_layers=1, num_heads=2, max_length=LENGTH, ffn_features=16
    )
    model = LanguageModel(config, 256)
    params = jax.jit(model.init)(jax.random.key(3), jnp.zeros((1, LENGTH), jnp.int32))["params"]
    params = jax.tree.map(lambda leaf: 2 * leaf, params)
    full_pass = jax.jit(lambda tokens: model.apply({"params": params}, tokens)[:, -1])
    return SimpleNamespace(
        model=model, params=params, tokenizer=BytesTokenizer(), full_pass=full_pass
    )


@pytest.fixture(scope="session")
def writer():
    return make_writer("ishe")


@pytest.fixture(scope="session")
def attention_writer():
    return make_writer("mha")
