"""Talking heads beside x-transformers (torch) on shared weights: pre, post, and both mixings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_extractor.ops import talking_heads_attention

pytestmark = [pytest.mark.core, pytest.mark.oracle]

HEADS, WIDTH, TIME = 4, 8, 11


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("causal", "block_size"), [(True, 4), (False, TIME)])
@pytest.mark.parametrize(("pre", "post"), [(True, False), (False, True), (True, True)])
def test_values_and_gradients_agree_with_x_transformers(pre, post, causal, block_size):
    torch = pytest.importorskip("torch")
    attend = pytest.importorskip("x_transformers.attend")
    q, k, v = (draw(n, 2, TIME, HEADS, WIDTH) for n in range(3))
    p_pre, p_post, cotangent = draw(3, HEADS, HEADS), draw(4, HEADS, HEADS), draw(5, *q.shape)
    valid = np.arange(TIME) < np.array([[TIME], [TIME - 3]])

    peer = attend.Attend(heads=HEADS, causal=causal, pre_talking_heads=pre, post_talking_heads=post)
    with torch.no_grad():  # its 1×1 convolutions hold (heads out, heads in, 1, 1)
        for layer, p in (
            (peer.pre_softmax_talking_heads, p_pre),
            (peer.post_softmax_talking_heads, p_post),
        ):
            if layer is not None:
                layer.weight.copy_(torch.from_numpy(p.T.copy())[:, :, None, None])
    theirs = [torch.from_numpy(x.swapaxes(1, 2).copy()).requires_grad_() for x in (q, k, v)]
    out, _ = peer(*theirs, mask=torch.from_numpy(valid))
    out.backward(torch.from_numpy(cotangent.swapaxes(1, 2).copy()))

    # Its first mixing is added to its input: J + J·P, which is J·(I + P) here.
    def ours(q, k, v, p_pre, p_post):
        o = talking_heads_attention(
            q,
            k,
            v,
            jnp.eye(HEADS) + p_pre if pre else None,
            p_post if post else None,
            causal=causal,
            mask=jnp.asarray(valid)[:, None, None],
            block_size=block_size,
        )
        return jnp.sum(o * cotangent), o

    gradients, o = jax.jit(jax.grad(ours, (0, 1, 2, 3, 4), has_aux=True))(
        *(jnp.asarray(x) for x in (q, k, v, p_pre, p_post))
    )
    np.testing.assert_allclose(o, out.detach().numpy().swapaxes(1, 2), rtol=1e-5, atol=2e-5)
    for ours_of, peers in zip(gradients, theirs, strict=False):
        expected = peers.grad.numpy().swapaxes(1, 2)
        np.testing.assert_allclose(ours_of, expected, rtol=1e-4, atol=1e-4)
    for used, layer, of_mixing in (
        (pre, peer.pre_softmax_talking_heads, gradients[3]),
        (post, peer.post_softmax_talking_heads, gradients[4]),
    ):
        if used:
            expected = layer.weight.grad.numpy()[:, :, 0, 0].T
            np.testing.assert_allclose(of_mixing, expected, rtol=1e-4, atol=1e-4)
