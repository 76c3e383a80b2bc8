"""Text without a framework: corpora, tokens on disk, batches. Needs numpy, never jax."""

from jax_extractor.data.batches import (
    Batch,
    Prefetcher,
    evaluation_batch_count,
    evaluation_batches,
    prefetch,
    train_batch,
)
from jax_extractor.data.dataset import DataConfig, Dataset, prepare
from jax_extractor.data.tokenizers import Tokenizer, load_tokenizer

__all__ = [
    "Batch",
    "DataConfig",
    "Dataset",
    "Prefetcher",
    "Tokenizer",
    "evaluation_batch_count",
    "evaluation_batches",
    "load_tokenizer",
    "prefetch",
    "prepare",
    "train_batch",
]
