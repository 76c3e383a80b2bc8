"""Pure functions on arrays: the extraction sum, its streaming form, attention and talking heads."""

from jax_extractor.ops.attention import (
    AttentionMaps,
    attention_maps,
    dot_product_attention,
    talking_heads_attention,
)
from jax_extractor.ops.attention_inputs import DynamicMixing
from jax_extractor.ops.auto import choose_method
from jax_extractor.ops.extraction import causal_extract, extraction_factor
from jax_extractor.ops.streaming import (
    StreamPlan,
    StreamState,
    init_stream,
    plan_stream,
    stream_prefill,
    stream_step,
)
from jax_extractor.ops.tuning import load_tuning, save_tuning, tune
from jax_extractor.ops.weight_spectrum import WeightSpectrum, transform_weights

__all__ = [
    "AttentionMaps",
    "DynamicMixing",
    "StreamPlan",
    "StreamState",
    "WeightSpectrum",
    "attention_maps",
    "causal_extract",
    "choose_method",
    "dot_product_attention",
    "extraction_factor",
    "init_stream",
    "load_tuning",
    "plan_stream",
    "save_tuning",
    "stream_prefill",
    "stream_step",
    "talking_heads_attention",
    "transform_weights",
    "tune",
]
