"""Suite-wide settings: eight simulated devices, strict promotion, checked shapes, key reuse."""

import contextlib
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The suite's time is compilation. `.ci/run` runs the core once more with all optimizations.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

import jax
import jaxtyping
import pytest
from jax.experimental.compilation_cache import compilation_cache

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_debug_key_reuse", True)

jaxtyping.install_import_hook("jax_extractor", "beartype.beartype")


@pytest.fixture
def x64():
    """float64 for one test."""
    with jax.enable_x64(True):
        yield


@contextlib.contextmanager
def _quick_compilation(directory):
    """Training compiles the same few programs again and again, and runs them for milliseconds."""
    settings = {
        "jax_disable_most_optimizations": True,
        "jax_compilation_cache_dir": str(directory),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config._read(name) for name in settings}

    def use(values):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()

    use(settings)
    try:
        yield
    finally:
        use(before)


@contextlib.contextmanager
def _one_device():
    device = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: device)
        yield


@pytest.fixture(scope="session")
def compiled_directory(tmp_path_factory):
    """Where compiled programs are kept for the session."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def quick_compilation(compiled_directory):
    """For tests that train: see `_quick_compilation`."""
    with _quick_compilation(compiled_directory):
        yield


@pytest.fixture(scope="module")
def one_device():
    """Only the first of the simulated devices: the ordinary case."""
    with _one_device():
        yield


@pytest.fixture
def array_files():
    """The files of a checkpoint's folder in which Orbax keeps the arrays; how many is its choice."""
    return lambda folder: [path for path in folder.rglob("d/*") if path.is_file()]


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory, compiled_directory):
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
    with _one_device(), _quick_compilation(compiled_directory):
        train(config, directory / "run")
    return directory / "run"
