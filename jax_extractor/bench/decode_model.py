"""Microseconds per token of a whole language model, part of jax-extractor bench decode.

Both ways write greedily in one `lax.scan` on the device, from an empty context, the same iSHE model:

    naive       every layer's extraction as one contiguous product over a double-length ring, no
                gather, with the weights in either layout; the rest by the model's own modules
    streaming   `generation.CachedDecoder`, the way the package writes text, all L tokens

A naive token costs the same wherever it stands, so a part of the L tokens is enough to time it.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jax_extractor.bench.decode import naive_step, naive_transposed_step, timed
from jax_extractor.bench.timing import Contestant, interleaved_medians
from jax_extractor.generation import CachedDecoder
from jax_extractor.models import FeedForward, LanguageModel, ModelConfig
from jax_extractor.shapes import Array, Float, Int, PyTree


@dataclass(frozen=True)
class ModelSizes:
    """The language model that is timed."""

    length: int = 2048
    batch: int = 1
    layers: int = 6
    features: int = 128
    ffn_features: int = 512
    vocabulary: int = 256


@dataclass(frozen=True)
class ModelRow:
    """Medians in microseconds per token; `speedup` is against the faster naive layout."""

    length: int
    batch: int
    layers: int
    features: int
    ffn_features: int
    vocabulary: int
    naive: float
    naive_transposed: float
    streaming: float
    speedup: float


def measure_model(sizes: ModelSizes, repeats: int, naive_seconds: float) -> ModelRow:
    """The interleaved medians of both ways; one naive run makes so many seconds of tokens."""
    ways = prepare_model(sizes)
    first = jnp.zeros(sizes.batch, jnp.int32)
    tokens, contestants = {}, []
    for name, way in ways.items():
        tokens[name] = sizes.length
        if name != "streaming":
            write(way[0], 2, *way[1:], first)
            once = timed(write, way[0], 2, *way[1:], first) / 2
            tokens[name] = min(sizes.length, max(8, int(naive_seconds / once)))
        call = partial(write, way[0], tokens[name], *way[1:], first)
        contestants.append(Contestant(name, lambda call=call: jax.block_until_ready(call())))
    seconds = interleaved_medians(contestants, repeats)
    naive, across, streaming = (
        seconds[name] / tokens[name] * 1e6 for name in ("naive", "naive transposed", "streaming")
    )
    return ModelRow(**asdict(sizes), naive=naive, naive_transposed=across, streaming=streaming,
                    speedup=min(naive, across) / streaming)  # fmt: skip


def prepare_model(sizes: ModelSizes) -> dict[str, tuple]:
    """Each way's step, weights and first state, for one model of random parameters."""
    config = ModelConfig(
        mixer="ishe", features=sizes.features, num_layers=sizes.layers, max_length=sizes.length,
        ffn_features=sizes.ffn_features,
    )  # fmt: skip
    model = LanguageModel(config, sizes.vocabulary)
    token = jnp.zeros((sizes.batch, 1), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(0), token)["params"]
    decoder = CachedDecoder(model)
    weights = decoder.prepare(params)
    # A prompt of padding alone leaves the streams as empty as they begin.
    _, empty = jax.jit(decoder.prefill)(weights, token, jnp.zeros(token.shape, bool))
    kernels = [layer["mixer"]["kernel"] for layer in layers(params)]
    rows = tuple(w[::-1].reshape(-1, sizes.features) for w in kernels)
    columns = tuple(w.T.copy() for w in rows)
    ring = jnp.zeros((sizes.batch, 2 * sizes.length, sizes.features))
    state = (jnp.zeros((), jnp.int32), ((jnp.zeros((), jnp.int32), ring),) * sizes.layers)
    return {
        "naive": (partial(naive_model_step, naive_step, config), (params, rows), state),
        "naive transposed": (
            partial(naive_model_step, naive_transposed_step, config), (params, columns), state
        ),
        "streaming": (decoder.step, weights, empty),
    }  # fmt: skip


@partial(jax.jit, static_argnums=(0, 1))
def write(
    step: Callable, tokens: int, weights: PyTree, state: PyTree, first: Int[Array, "B"]
) -> Float[Array, "N B V"]:
    """The logits after `first` and after each token that they make most probable."""

    def body(carry, _):
        state, token = carry
        logits, state = step(weights, state, token)
        return (state, jnp.argmax(logits, axis=-1).astype(jnp.int32)), logits

    return lax.scan(body, (state, first), None, length=tokens)[1]


def layers(params: PyTree) -> list[PyTree]:
    """The parameters of each layer."""
    core = params["core"]
    return [core[f"layers_{index}"] for index in range(len(core))]


def naive_model_step(
    extract: Callable, config: ModelConfig, weights: PyTree, state: PyTree, tokens: Int[Array, "B"]
) -> tuple[Float[Array, "B V"], PyTree]:
    """One token through the model, all L·D² weights of each layer read for it."""
    params, kernels = weights
    seen, rings = state
    scale = lax.rsqrt(jnp.minimum(seen + 1, config.max_length).astype(jnp.float32))
    x = params["embed"]["embedding"][tokens]
    feed, moved = FeedForward(config), []
    for layer, kernel, ring in zip(layers(params), kernels, rings, strict=True):
        rows = norm(layer["mixer_norm"], x)
        extracted, ring = extract(kernel, ring, rows)
        x = x + extracted * scale * (rows @ layer["mixer"]["adjust"]["kernel"])
        x = x + cast(Array, feed.apply({"params": layer["ffn"]}, norm(layer["ffn_norm"], x)))
        moved.append(ring)
    logits = norm(params["final_norm"], x) @ params["softmax"]["kernel"]
    return logits, (seen + 1, tuple(moved))


def norm(params: PyTree, x: Float[Array, "B D"]) -> Float[Array, "B D"]:
    """The model's layer normalisation."""
    return cast(Array, nn.LayerNorm().apply({"params": params}, x))
