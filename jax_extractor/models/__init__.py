"""The Transformer core and what is built on it."""

from jax_extractor.models.config import ExtractorConfig, ModelConfig, TalkingHeadsConfig
from jax_extractor.models.core import Core, FeedForward, Layer, mixer_from_config, stack_layers
from jax_extractor.models.language_model import LanguageModel

__all__ = [
    "Core",
    "ExtractorConfig",
    "FeedForward",
    "LanguageModel",
    "Layer",
    "ModelConfig",
    "TalkingHeadsConfig",
    "mixer_from_config",
    "stack_layers",
]
