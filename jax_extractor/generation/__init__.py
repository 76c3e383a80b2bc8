"""Text from a trained model: sampling, beam search, and the decoding interface beneath them."""

from jax_extractor.generation.beam import Beam, beam_search
from jax_extractor.generation.cached import CachedDecoder, RereadingDecoder
from jax_extractor.generation.decoding import Decoder, WindowDecoder, make_decoder
from jax_extractor.generation.generate import Completion, GenerationConfig, Piece, generate, stream
from jax_extractor.generation.sampling import SamplingConfig, sample, sample_keys

__all__ = [
    "Beam",
    "CachedDecoder",
    "Completion",
    "Decoder",
    "GenerationConfig",
    "Piece",
    "RereadingDecoder",
    "SamplingConfig",
    "WindowDecoder",
    "beam_search",
    "generate",
    "make_decoder",
    "sample",
    "sample_keys",
    "stream",
]
