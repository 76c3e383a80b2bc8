"""Suite-wide settings: eight simulated devices, strict promotion, checked shapes, key reuse."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

import jax
import jaxtyping
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_debug_key_reuse", True)

jaxtyping.install_import_hook("jax_extractor", "beartype.beartype")


@pytest.fixture
def x64():
    """float64 for one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """The directory of an iSHE language model of 2 layers, trained for 3 steps on a text file."""
    from jax_extractor.data import DataConfig
    from jax_extractor.models import ModelConfig
    from jax_extractor.training import Config, TrainConfig, train

    directory = tmp_path_factory.mktemp("tiny")
    text = directory / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog: ça, naïve — 42.\n" * 40)
    config = Config(
        model=ModelConfig(features=16, num_layers=2, num_heads=2, max_length=16, ffn_features=32),
        data=DataConfig(source="files", files=(str(text),)),
        train=TrainConfig(steps=3, batch_size=8, eval_batches=1),
    )
    train(config, directory / "run")
    return directory / "run"
