"""Mixers by name."""

import jax.numpy as jnp
import pytest

from jax_extractor.errors import UsageError
from jax_extractor.mixers import (
    HE,
    ISHE,
    ME,
    MIXERS,
    SHE,
    WE,
    MultiHeadAttention,
    make_mixer,
    mixer_class,
)

pytestmark = pytest.mark.core


def test_names():
    known = {"she": SHE, "ishe": ISHE, "he": HE, "we": WE, "me": ME, "mha": MultiHeadAttention}
    assert known.items() <= MIXERS.items()
    assert all(mixer_class(name) is cls for name, cls in known.items())


@pytest.mark.parametrize("name", MIXERS)
def test_every_mixer_takes_the_common_fields(name):
    mixer = make_mixer(name, max_length=8, num_heads=2, dtype=jnp.dtype("float32"))
    assert (type(mixer), mixer.max_length) == (MIXERS[name], 8)


def test_fields_reach_the_module():
    mixer = make_mixer("ishe", max_length=3, adjust_activation="tanh", name="mixer")
    assert mixer == ISHE(max_length=3, adjust_activation="tanh", name="mixer")


@pytest.mark.parametrize("find", [make_mixer, mixer_class])
def test_an_unknown_mixer_lists_the_known_ones(find):
    with pytest.raises(UsageError, match="unknown mixer 'lstm': choose one of ") as error:
        find("lstm")
    listed = str(error.value).removeprefix("unknown mixer 'lstm': choose one of ").split(", ")
    assert listed == sorted(MIXERS)


def test_an_unknown_field_lists_the_known_ones():
    with pytest.raises(UsageError, match="unknown field of mixer 'she' 'heads': choose") as error:
        make_mixer("she", max_length=4, heads=2)
    listed = str(error.value).split("choose one of ")[1].split(", ")
    assert {"max_length", "num_heads", "kernel_scale", "adjust_bias", "method"} <= set(listed)
    assert not {"parent", "name"} & set(listed)


@pytest.mark.parametrize(
    ("name", "field"),
    [(n, "max_length") for n in ("she", "ishe", "he", "we", "me")] + [("mha", "num_heads")],
)
def test_a_field_left_out_is_named(name, field):
    with pytest.raises(UsageError, match=f"mixer '{name}' needs {field}: pass {field}=…"):
        make_mixer(name)
