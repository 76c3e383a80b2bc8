"""A tiny configuration, its finished run on one device, and compilation that costs little."""

import contextlib

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jax_extractor.data import DataConfig
from jax_extractor.models import ModelConfig
from jax_extractor.training import Config, OptimizerConfig, TrainConfig, train

TEXT = "The quick brown fox jumps over the lazy dog: ça, naïve — 42.\n" * 40


@pytest.fixture(scope="session")
def compiled_directory(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@contextlib.contextmanager
def settings(**values):
    before = {name: jax.config._read(name) for name in values}
    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.fixture(scope="module", autouse=True)
def quick_compilation(compiled_directory):
    """Training compiles the same few programs again and again, and runs them for milliseconds."""
    with settings(
        jax_disable_most_optimizations=True,
        jax_compilation_cache_dir=str(compiled_directory),
        jax_persistent_cache_min_compile_time_secs=0.0,
        jax_persistent_cache_min_entry_size_bytes=-1,
    ):
        yield


@pytest.fixture(scope="module")
def one_device():
    """Only the first of the simulated devices: the ordinary case."""
    device = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: device)
        yield


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
