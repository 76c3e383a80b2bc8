"""What one would take off the shelf for the extraction sum with a matrix per offset.

Each takes x (B, T, D) and w (L, D, E), L = T, and gives y (B, T, E). They are written as their
users write them, and tested to compute the same sum.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jax_extractor.bench.timing import Contestant
from jax_extractor.shapes import Array


def linen_conv(x: Array, w: Array) -> Array:
    """flax.linen.Conv with a kernel as long as the context and causal padding."""
    layer = nn.Conv(w.shape[2], (w.shape[0],), padding="CAUSAL", use_bias=False)
    y = layer.apply({"params": {"kernel": w[::-1]}}, x)
    assert isinstance(y, Array)
    return y


def lax_conv(x: Array, w: Array) -> Array:
    """lax.conv_general_dilated, channels first, as in its documentation."""
    y = lax.conv_general_dilated(
        x.swapaxes(1, 2), w[::-1].transpose(2, 1, 0), (1,), [(w.shape[0] - 1, 0)]
    )
    return y.swapaxes(1, 2)


def jnp_fft(x: Array, w: Array) -> Array:
    """The one-liner with jnp.fft."""
    n = 2 * x.shape[1]
    y_hat = jnp.einsum("bfd,fde->bfe", jnp.fft.rfft(x, n, axis=1), jnp.fft.rfft(w, n, axis=0))
    return jnp.fft.irfft(y_hat, n, axis=1)[:, : x.shape[1]]


JAX_PEERS: dict[str, Callable] = {
    "flax.linen.Conv": linen_conv,
    "lax.conv": lax_conv,
    "jnp.fft": jnp_fft,
}


def torch_peers() -> dict[str, Callable]:
    """torch's Conv1d and FFT as functions of tensors; empty where torch is not installed."""
    try:
        import torch
    except ImportError:
        return {}

    def conv1d(x, w):
        kernel = w.flip(0).permute(2, 1, 0)
        padded = torch.nn.functional.pad(x.transpose(1, 2), (w.shape[0] - 1, 0))
        return torch.nn.functional.conv1d(padded, kernel).transpose(1, 2)

    def fft(x, w):
        n = 2 * x.shape[1]
        y_hat = torch.einsum(
            "bfd,fde->bfe", torch.fft.rfft(x, n, dim=1), torch.fft.rfft(w, n, dim=0)
        )
        return torch.fft.irfft(y_hat, n, dim=1)[:, : x.shape[1]]

    return {"torch Conv1d": conv1d, "torch FFT": fft}


def torch_contestant(name: str, f: Callable, x: Array, w: Array, backward: bool) -> Contestant:
    """f of torch tensors with the values of x and w, forward, or with the gradient of sum(y^2)."""
    import torch

    leaves = [torch.tensor(jax.device_get(a), requires_grad=backward) for a in (x, w)]

    def call():
        if backward:
            torch.autograd.grad((f(*leaves) ** 2).sum(), leaves)
        else:
            f(*leaves)

    return Contestant(name, call)
