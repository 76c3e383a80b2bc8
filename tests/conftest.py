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
