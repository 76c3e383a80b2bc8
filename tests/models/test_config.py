"""ModelConfig.check: what does not fit is named, with its value and the remedy."""

import dataclasses

import pytest

from jax_extractor.errors import UsageError
from jax_extractor.mixers import MIXERS
from jax_extractor.models import ExtractorConfig, ModelConfig
from jax_extractor.models.config import POSITIONAL_MIXERS, ROTARY_MIXERS

pytestmark = pytest.mark.core


def config_with(**fields):
    """A configuration whose fields are set as a user's program can, past the suite's type checks."""
    config = ModelConfig()
    for name, value in fields.items():
        object.__setattr__(config, name, value)
    return config


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("arrangement", ["mixer-ffn", "ffn-mixer", "mixer", "ffn", "parallel"])
def test_what_fits_passes(mixer, arrangement):
    ModelConfig(mixer=mixer, arrangement=arrangement, dropout=0.5, dtype="bfloat16").check()


def test_the_mixers_are_divided_among_the_two_kinds():
    assert {"she", "ishe", "he", "we", "me"} <= POSITIONAL_MIXERS
    assert not POSITIONAL_MIXERS & ROTARY_MIXERS
    assert set(MIXERS) >= POSITIONAL_MIXERS | ROTARY_MIXERS


@pytest.mark.parametrize("mixer", MIXERS)
def test_auto_positions(mixer):
    config = ModelConfig(mixer=mixer)
    assert config.resolved_positions() == ("none" if mixer in POSITIONAL_MIXERS else "learned")
    assert dataclasses.replace(config, positions="none").resolved_positions() == "none"


@pytest.mark.parametrize("positions", ["auto", "learned", "sinusoidal", "rotary", "none"])
def test_attention_takes_all_positions(positions):
    ModelConfig(mixer="mha", positions=positions).check()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"mixer": "lstm"},
            "unknown model.mixer 'lstm': choose one of " + ", ".join(sorted(MIXERS)),
        ),
        ({"features": 0}, "model.features=0: choose at least 1"),
        ({"num_layers": -1}, "model.num_layers=-1: choose at least 1"),
        ({"num_heads": 0}, "model.num_heads=0: choose at least 1"),
        ({"max_length": 0}, "model.max_length=0: choose at least 1"),
        ({"ffn_features": 0}, "model.ffn_features=0: choose at least 1"),
        ({"dropout": 1.0}, "model.dropout=1.0: choose a rate from 0 to below 1"),
        ({"dropout": -0.1}, "model.dropout=-0.1: choose a rate from 0 to below 1"),
        (
            {"ffn_activation": "swish"},
            "unknown activation in model.ffn_activation 'swish': "
            "choose one of gelu, identity, relu, sigmoid, silu, tanh",
        ),
        (
            {"extractor": ExtractorConfig(adjust_activation="swish")},
            "unknown activation in model.extractor.adjust_activation 'swish': "
            "choose one of gelu, identity, relu, sigmoid, silu, tanh",
        ),
        (
            {"arrangement": "sandwich"},
            "unknown model.arrangement 'sandwich': "
            "choose one of ffn, ffn-mixer, mixer, mixer-ffn, parallel",
        ),
        (
            {"positions": "alibi"},
            "unknown model.positions 'alibi': choose one of auto, learned, none, rotary, sinusoidal",
        ),
        ({"dtype": "float16"}, "unknown model.dtype 'float16': choose one of bfloat16, float32"),
        (
            {"mixer": "he", "positions": "rotary"},
            "model.positions=rotary with model.mixer=he: only "
            f"{', '.join(sorted(ROTARY_MIXERS))} rotate queries and keys; choose auto",
        ),
        (
            {"mixer": "ishe", "positions": "learned"},
            "model.positions=learned with model.mixer=ishe: an Extractor's weights know the "
            "offset already; choose auto or none",
        ),
        (
            {"mixer": "me", "positions": "sinusoidal"},
            "model.positions=sinusoidal with model.mixer=me: an Extractor's weights know the "
            "offset already; choose auto or none",
        ),
    ],
)
def test_what_does_not_fit_is_named(fields, message):
    with pytest.raises(UsageError) as error:
        config_with(**fields).check()
    assert str(error.value) == message
