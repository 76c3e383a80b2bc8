"""The Transformer core: a stack of M layers, each of sublayer 1 (a mixer) and sublayer 2 (an FFN).

    mixer-ffn:  x ← x + drop(mixer(norm(x)));  x ← x + drop(ffn(norm(x)))
    ffn-mixer:  the two in the other order
    mixer, ffn: one of them alone
    parallel:   x ← x + drop(mixer(norm(x)) + ffn(norm(x))), one norm (Chowdhery et al. 2022, PaLM)

norm is layer normalisation, left out where pre_norm is off.
"""

import dataclasses
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from jax_extractor.mixers import make_mixer, mixer_class
from jax_extractor.mixers.common import activation
from jax_extractor.models.config import POSITIONAL_MIXERS, TALKING_MIXERS, ModelConfig
from jax_extractor.shapes import Array, PyTree

DYNAMIC_SWITCHES = (
    "dynamic_query_logits",
    "dynamic_memory_logits",
    "dynamic_query_weights",
    "dynamic_memory_weights",
)


def mixer_from_config(config: ModelConfig) -> nn.Module:
    """Sublayer 1 as the configuration describes it."""
    options: dict = {
        "num_heads": config.num_heads,
        "max_length": config.max_length,
        "dtype": jnp.dtype(config.dtype),
        "rotary": config.resolved_positions() == "rotary",
    }
    if config.mixer in POSITIONAL_MIXERS:
        options |= vars(config.extractor)
    elif config.mixer in TALKING_MIXERS:
        options |= vars(config.talking_heads)
        options |= dict.fromkeys(DYNAMIC_SWITCHES, config.talking_heads.dynamic)
    # A mixer takes of these what it has a field for.
    fields = {field.name for field in dataclasses.fields(mixer_class(config.mixer))}
    chosen = {name: value for name, value in options.items() if name in fields}
    return make_mixer(config.mixer, **chosen)


class FeedForward(nn.Module):
    """Sublayer 2: ffn(x) = act(x W_1 + b_1) W_2 + b_2, the same map for every row vector."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns (B, T, D) for x (B, T, D)."""
        dtype = jnp.dtype(self.config.dtype)
        hidden = nn.Dense(self.config.ffn_features, dtype=dtype, name="expand")(x)
        hidden = activation(self.config.ffn_activation)(hidden)
        return nn.Dense(self.config.features, dtype=dtype, name="contract")(hidden)


#: What a layer may keep; scanned layers keep them one after the other.
COLLECTIONS = ("params", "cache", "plan", "spectra", "intermediates")


class Layer(nn.Module):
    """One layer of the core, in the arrangement of the configuration."""

    config: ModelConfig

    def setup(self) -> None:
        """Declares the sublayers that the arrangement has, and a norm for each way into them."""
        arrangement = self.config.arrangement
        if arrangement != "ffn":
            self.mixer = mixer_from_config(self.config)
        if arrangement != "mixer":
            self.ffn = FeedForward(self.config)
        if self.config.pre_norm:
            dtype = jnp.dtype(self.config.dtype)
            if arrangement not in ("ffn",):
                self.mixer_norm = nn.LayerNorm(dtype=dtype)
            if arrangement not in ("mixer", "parallel"):
                self.ffn_norm = nn.LayerNorm(dtype=dtype)
        self.drop = nn.Dropout(self.config.dropout)

    def __call__(
        self, x: Array, valid: Array | None, deterministic: bool, decode: bool = False
    ) -> Array:
        """Returns (B, T, D) for x (B, T, D)."""
        norm = self.config.pre_norm

        def mix(x: Array) -> Array:
            return self.mixer(self.mixer_norm(x) if norm else x, valid, deterministic, decode)

        def feed(x: Array) -> Array:
            return self.ffn(self.ffn_norm(x) if norm else x)

        def both(x: Array) -> Array:
            x = self.mixer_norm(x) if norm else x
            return self.mixer(x, valid, deterministic, decode) + self.ffn(x)

        sublayers: dict[str, tuple[Callable[[Array], Array], ...]] = {
            "mixer-ffn": (mix, feed),
            "ffn-mixer": (feed, mix),
            "mixer": (mix,),
            "ffn": (feed,),
            "parallel": (both,),
        }
        for sublayer in sublayers[self.config.arrangement]:
            x = x + self.drop(sublayer(x), deterministic=deterministic)
        return x


class Core(nn.Module):
    """M layers: drives the input rows towards the output rows, which are the predictions.

    Called as `(x, valid, deterministic)`; returns the output rows (B, T, D) and, with
    return_rows=True, the rows before the first and after every layer as well, (M+1, B, T, D).
    """

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        x: Array,
        valid: Array | None = None,
        deterministic: bool = True,
        return_rows: bool = False,
        decode: bool = False,
    ) -> tuple[Array, Array | None]:
        """Returns (output rows, all rows or None)."""

        def apply_layer(layer: Layer, x: Array) -> Array:
            return layer(x, valid, deterministic, decode)

        if self.config.remat and not decode:
            apply_layer = nn.remat(apply_layer, prevent_cse=not self.config.scan_layers)

        if self.config.scan_layers:

            def body(layer: Layer, x: Array, _) -> tuple[Array, Array | None]:
                y = apply_layer(layer, x)
                return y, (y if return_rows else None)

            scan = nn.scan(
                body,
                variable_axes=dict.fromkeys(COLLECTIONS, 0),
                split_rngs={"params": True, "dropout": True},
                length=self.config.num_layers,
            )
            y, rows = scan(Layer(self.config, name="layers"), x, None)
            return y, (None if rows is None else jnp.concatenate([x[None], rows]))

        all_rows = [x]
        for index in range(self.config.num_layers):
            all_rows.append(apply_layer(Layer(self.config, name=f"layers_{index}"), all_rows[-1]))
        return all_rows[-1], (jnp.stack(all_rows) if return_rows else None)


def stack_layers(core_params: PyTree) -> PyTree:
    """Parameters of an unrolled core (layers_0, layers_1, …) as those of a scanned one (layers)."""
    layers = [core_params[f"layers_{i}"] for i in range(len(core_params))]
    return {"layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}
