"""A tiny configuration, its finished run on one device, and compilation that costs little."""

import pytest

from jax_extractor.data import DataConfig
from jax_extractor.models import ModelConfig
from jax_extractor.training import Config, OptimizerConfig, TrainConfig, train

TEXT = "The quick brown fox jumps over the lazy dog: ça, naïve — 42.\n" * 40


@pytest.fixture(scope="module", autouse=True)
def _compile_quickly(quick_compilation):
    """For every test of this folder."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A configuration of 12 steps: rows at each second, validation at 6, checkpoints at each 4th."""
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text(TEXT)
    return Config(
        model=ModelConfig(features=16, num_layers=1, max_length=8, ffn_features=32),
        data=DataConfig(source="files", files=(str(text),)),
        optimizer=OptimizerConfig(learning_rate=0.01),
        train=TrainConfig(
            steps=12, batch_size=8, log_every=2, eval_every=6, eval_batches=2, checkpoint_every=4
        ),
    )


@pytest.fixture(scope="module")
def trained(tiny, one_device, tmp_path_factory):
    """The run directory of `tiny`, trained without interruption; to be read only."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    train(tiny, directory)
    return directory
