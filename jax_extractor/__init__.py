"""jax_extractor: the Extractor family and talking-heads attention for JAX and Flax.

`ops` has the pure functions, `mixers` the Flax modules that take self-attention's place, `models`
the Transformer around them, `training`, `data` and `generation` what makes it a tool. The names of
`__all__` can be taken from here.
"""

import importlib
from typing import Any

from jax_extractor.errors import InputError, UsageError

#: Where each name comes from. They are imported when first used, because that brings jax, and the
#: command line answers bad usage without it.
_HOMES = {
    "ops": "",
    "mixers": "",
    "models": "",
    "HE": "mixers",
    "ISHE": "mixers",
    "ME": "mixers",
    "SHE": "mixers",
    "WE": "mixers",
    "CrossModalTalkingHeads": "mixers",
    "Extractor": "mixers",
    "MultiHeadAttention": "mixers",
    "TalkingHeadsAttention": "mixers",
    "make_mixer": "mixers",
    "Core": "models",
    "LanguageModel": "models",
    "ModelConfig": "models",
}

__all__ = ["InputError", "UsageError", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    module = importlib.import_module(f"{__name__}.{home or name}")
    return getattr(module, name) if home else module


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
