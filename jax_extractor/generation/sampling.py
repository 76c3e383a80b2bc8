"""From logits to a token: repetition penalty, temperature, top-k, top-p, min-p, in this order.

Every step maps logits (B, V) to logits (B, V), with −∞ for what may not be drawn; the most probable
token always may. The steps are those that the configuration asks for, so a greedy program sorts
nothing.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jax_extractor.errors import UsageError
from jax_extractor.shapes import Array, Bool, Float, Int, Key

#: Logits divided by less overflow; dividing by as little takes the most probable token anyway.
SMALLEST_TEMPERATURE = 1e-30


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are drawn. The defaults draw from the model's distribution as it is."""

    temperature: float = 1.0
    """Logits are divided by it; 0, or less than 1e-30, takes the most probable token (greedy)."""
    top_k: int = 0
    """Draw among the k most probable tokens; 0: among all."""
    top_p: float = 1.0
    """Draw among the most probable tokens that together reach this probability."""
    min_p: float = 0.0
    """Draw among tokens with at least this share of the most probable one's probability."""
    repetition_penalty: float = 1.0
    """How much less likely a token of the prompt or text so far becomes; 1: no penalty."""

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken and nothing drawn."""
        return self.temperature < SMALLEST_TEMPERATURE

    def check(self) -> None:
        """Raises UsageError naming the first field that does not fit."""
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature={self.temperature}: choose 0 (greedy) or more")
        if self.top_k < 0:
            raise UsageError(f"top_k={self.top_k}: choose 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p={self.top_p}: choose above 0, at most 1 (all tokens)")
        if not 0 <= self.min_p <= 1:
            raise UsageError(f"min_p={self.min_p}: choose from 0 (all tokens) to 1")
        if not 0 < self.repetition_penalty < float("inf"):
            raise UsageError(
                f"repetition_penalty={self.repetition_penalty}: choose above 0 (1: no penalty)"
            )


def penalize_repetition(
    logits: Float[Array, "B V"], seen: Bool[Array, "B V"], penalty: float
) -> Float[Array, "B V"]:
    """z / θ where a seen token's logit z is positive, z · θ where it is negative.

    Source: Keskar et al. 2019 (CTRL), section 4.1, which divides by θ and leaves out the sign; a
    negative logit divided by θ > 1 would become more likely.
    """
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: Float[Array, "B V"], k: int) -> Float[Array, "B V"]:
    """The k largest logits, and those equal to the smallest of them (Fan et al. 2018)."""
    smallest = jax.lax.top_k(logits, min(k, logits.shape[-1]))[0][:, -1:]
    return jnp.where(logits >= smallest, logits, -jnp.inf)


def keep_top_p(logits: Float[Array, "B V"], p: float) -> Float[Array, "B V"]:
    """The smallest set of most probable tokens whose probabilities sum to p or more, with ties.

    Source: Holtzman et al. 2020, nucleus sampling.
    """
    ordered = jnp.sort(logits, axis=-1, descending=True)
    probability = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    # The first is kept whatever rounding makes of a tiny p.
    kept = (before < p).at[:, 0].set(True)
    smallest = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= smallest, logits, -jnp.inf)


def keep_min_p(logits: Float[Array, "B V"], p: float) -> Float[Array, "B V"]:
    """The tokens with probability ≥ p · (the largest probability) (Nguyen et al. 2024, min-p)."""
    largest = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.where(logits - largest >= jnp.log(p), logits, -jnp.inf)


def modify(
    logits: Float[Array, "B V"], config: SamplingConfig, seen: Bool[Array, "B V"]
) -> Float[Array, "B V"]:
    """The logits that are drawn from: every step that the configuration asks for."""
    if config.repetition_penalty != 1:
        logits = penalize_repetition(logits, seen, config.repetition_penalty)
    if config.greedy:
        return logits  # the argmax is the same with and without the steps below
    logits = logits / config.temperature
    if config.top_k:
        logits = keep_top_k(logits, config.top_k)
    if config.top_p < 1:
        logits = keep_top_p(logits, config.top_p)
    if config.min_p > 0:
        logits = keep_min_p(logits, config.min_p)
    return logits


def sample_keys(seed: int | Array, samples: Int[Array, "B"]) -> Key[Array, "B"]:
    """A key for each row from (seed, number of the sample), whatever else is in the batch."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), samples)


def sample(
    logits: Float[Array, "B V"],
    keys: Key[Array, "B"],
    position: Int[Array, ""],
    config: SamplingConfig,
    seen: Bool[Array, "B V"],
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """Draws a token for each row: argmax_v (z_v + g_v), z the modified logits, g Gumbel noise.

    The noise depends on (key, position) of its row alone, so a row's text does not depend on the
    batch around it (to the rounding of its logits).

    Shapes: logits (B, V), keys (B,) from `sample_keys`, position () the number of tokens drawn
    before, seen (B, V) the tokens of prompt and text so far. Returns tokens (B,) int32 and
    their log-probabilities (B,) under the unmodified model, log_softmax(logits): no temperature,
    no penalty, nothing cut off.
    """
    modified = modify(logits, config, seen)
    if not config.greedy:
        now = jax.vmap(jax.random.fold_in, (0, None))(keys, position)
        modified += jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], logits.dtype))(
            now
        )
    tokens = jnp.argmax(modified, axis=-1).astype(jnp.int32)
    log_probabilities = jax.nn.log_softmax(logits, axis=-1)
    return tokens, jnp.take_along_axis(log_probabilities, tokens[:, None], axis=-1)[:, 0]
