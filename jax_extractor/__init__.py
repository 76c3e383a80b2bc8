"""jax_extractor."""
