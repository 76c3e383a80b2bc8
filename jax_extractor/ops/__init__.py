from jax_extractor.ops.extraction import causal_extract, extraction_factor

__all__ = ["causal_extract", "extraction_factor"]
from jax_extractor.ops.attention import (
    AttentionMaps as AttentionMaps,
)
from jax_extractor.ops.attention import (
    attention_maps as attention_maps,
)
from jax_extractor.ops.attention import (
    dot_product_attention as dot_product_attention,
)
from jax_extractor.ops.attention import (
    talking_heads_attention as talking_heads_attention,
)
from jax_extractor.ops.attention_inputs import DynamicMixing as DynamicMixing
from jax_extractor.ops.auto import choose_method as choose_method
from jax_extractor.ops.streaming import (
    StreamPlan as StreamPlan,
)
from jax_extractor.ops.streaming import (
    StreamState as StreamState,
)
from jax_extractor.ops.streaming import (
    init_stream as init_stream,
)
from jax_extractor.ops.streaming import (
    plan_stream as plan_stream,
)
from jax_extractor.ops.streaming import (
    stream_prefill as stream_prefill,
)
from jax_extractor.ops.streaming import (
    stream_step as stream_step,
)
from jax_extractor.ops.tuning import load_tuning as load_tuning
from jax_extractor.ops.tuning import save_tuning as save_tuning
from jax_extractor.ops.tuning import tune as tune
