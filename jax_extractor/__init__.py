"""jax_extractor: the Extractor family and talking-heads attention for JAX and Flax.

`ops` has the pure functions, `mixers` the Flax modules that take self-attention's place, `models`
the Transformer around them, `training`, `data` and `generation` what makes it a tool.
"""

from jax_extractor import ops
from jax_extractor.errors import InputError, UsageError
from jax_extractor.mixers import (
    HE,
    ISHE,
    ME,
    SHE,
    WE,
    CrossModalTalkingHeads,
    Extractor,
    MultiHeadAttention,
    TalkingHeadsAttention,
    make_mixer,
)
from jax_extractor.models import Core, LanguageModel, ModelConfig

__all__ = [
    "HE",
    "ISHE",
    "ME",
    "SHE",
    "WE",
    "Core",
    "CrossModalTalkingHeads",
    "Extractor",
    "InputError",
    "LanguageModel",
    "ModelConfig",
    "MultiHeadAttention",
    "TalkingHeadsAttention",
    "UsageError",
    "make_mixer",
    "ops",
]
