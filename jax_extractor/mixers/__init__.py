"""Sublayer 1: what mixes the row vectors of a sequence, as Flax modules of one call signature.

Every mixer is called as `mixer.apply(variables, x, valid=None, deterministic=True)` with x
(B, T, D) and valid (B, T) bool, and returns (B, T, D), so that any of them drops into any
Transformer. To add one: write the module, add a line to MIXERS.

Decoding is the same for all: `mixer.apply(variables, x, valid, decode=True, mutable=["cache",
"plan"])` returns the output and the collections to pass on. Without a cache x is a whole prompt
(B, P, D), of rows left-padded to one length where valid says so; with one it is the next position
(B, 1, D). Outputs equal those of the whole sequence at once.
"""

import dataclasses

import flax.linen as nn

from jax_extractor.errors import UsageError, unknown_name
from jax_extractor.mixers.attention import MultiHeadAttention
from jax_extractor.mixers.cross_modal import CrossModalTalkingHeads
from jax_extractor.mixers.extractor import HE, ISHE, ME, SHE, WE, Extractor
from jax_extractor.mixers.talking_heads import TalkingHeadsAttention

MIXERS: dict[str, type[nn.Module]] = {
    "she": SHE,
    "ishe": ISHE,
    "he": HE,
    "we": WE,
    "me": ME,
    "mha": MultiHeadAttention,
    "talking_heads": TalkingHeadsAttention,
    "cross_modal": CrossModalTalkingHeads,
}


def mixer_class(name: str) -> type[nn.Module]:
    """The module of that name; an unknown name lists the known ones (UsageError)."""
    if name not in MIXERS:
        raise unknown_name("mixer", name, MIXERS)
    return MIXERS[name]


def make_mixer(name: str, /, **options) -> nn.Module:
    """The mixer of that name with its fields set, for example `make_mixer("ishe", max_length=64)`.

    Every mixer has the fields `max_length` and `num_heads`, and uses what it needs of them.

    Raises:
        UsageError: an unknown mixer, an unknown field, or a field without default left out; the
            message lists what there is.
    """
    cls = mixer_class(name)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init and f.name != "parent"}
    for option in options:
        if option not in fields:
            raise unknown_name(f"field of mixer {name!r}", option, set(fields) - {"name"})
    for field in fields.values():
        required = field.default is dataclasses.MISSING
        if required and field.default_factory is dataclasses.MISSING and field.name not in options:
            raise UsageError(f"mixer {name!r} needs {field.name}: pass {field.name}=…")
    return cls(**options)


__all__ = [
    "HE",
    "ISHE",
    "ME",
    "MIXERS",
    "SHE",
    "WE",
    "CrossModalTalkingHeads",
    "Extractor",
    "MultiHeadAttention",
    "TalkingHeadsAttention",
    "make_mixer",
    "mixer_class",
]
