"""The front door: `jax-extractor COMMAND`. Each command is a module of this folder."""

from jax_extractor.cli.main import main

__all__ = ["main"]
