"""Beam search: the continuations of highest probability among those that a beam of W keeps."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_extractor.errors import UsageError
from jax_extractor.generation.decoding import Decoder, make_decoder
from jax_extractor.generation.generate import Writer
from jax_extractor.generation.text import encode_prompt, pad_prompts
from jax_extractor.shapes import Array, Bool, Float, Int, PyTree


class Beam(NamedTuple):
    """A continuation: its text, its tokens, and Σ log p(token | what stands before it), in nats."""

    text: str
    tokens: tuple[int, ...]
    log_probability: float


@partial(jax.jit, static_argnames=("decoder", "width", "length"))
def search(
    decoder: Decoder,
    width: int,
    length: int,
    weights: PyTree,
    tokens: Int[Array, "B P"],
    valid: Bool[Array, "B P"],
) -> tuple[Int[Array, "B W N"], Float[Array, "B W"]]:
    """N = length tokens for each of W beams, best first, and the beams' log-probabilities.

    score(beam, v) = score(beam) + log p(v | beam);  the W best of the W·V go on
    """
    logits, state = decoder.prefill(weights, tokens, valid)
    batch, vocab = logits.shape
    row = jnp.arange(batch)[:, None] * width  # where a row's beams begin in the state
    state = decoder.select(state, jnp.repeat(jnp.arange(batch), width))
    logits = jnp.repeat(logits, width, axis=0)
    # All beams are the same at first: only one may go on, or all of them would stay the same.
    scores = jnp.full((batch, width), -jnp.inf).at[:, 0].set(0.0)
    written = jnp.zeros((batch, width, length), jnp.int32)

    def body(carry, position):
        state, logits, scores, written = carry
        log_p = jax.nn.log_softmax(logits, axis=-1).reshape(batch, width, vocab)
        scores, best = jax.lax.top_k((scores[..., None] + log_p).reshape(batch, -1), width)
        parent, token = best // vocab, best % vocab
        written = jnp.take_along_axis(written, parent[..., None], axis=1)
        written = written.at[:, :, position].set(token)
        state = decoder.select(state, (row + parent).reshape(-1))
        logits, state = decoder.step(weights, state, token.reshape(-1))
        return (state, logits, scores, written), None

    carry = (state, logits, scores, written)
    (_, _, scores, written), _ = jax.lax.scan(body, carry, jnp.arange(length))
    return written, scores


def beam_search(
    run: Writer,
    prompts: Sequence[str],
    *,
    width: int = 4,
    max_tokens: int = 64,
    decoder: Decoder | None = None,
) -> list[list[Beam]]:
    """For each prompt the W = width beams after max_tokens tokens, best first (see `search`).

    All beams have the same length, so their log-probabilities compare without a correction.

    Raises UsageError where width is not from 1 to V or there is nothing to do, and InputError for
    a prompt that the tokenizer has no token for.
    """
    if not 1 <= width <= run.tokenizer.vocab_size:
        raise UsageError(f"width={width}: choose from 1 to {run.tokenizer.vocab_size} (vocabulary)")
    for name, value in (("max_tokens", max_tokens), ("prompts", len(prompts))):
        if value < 1:
            raise UsageError(f"{name}={value}: choose at least 1")
    encoded = [encode_prompt(run.tokenizer, prompt) for prompt in prompts]
    decoder = decoder or make_decoder(run.model)
    padded = pad_prompts(encoded, decoder.prompt_width(max(map(len, encoded))))
    tokens, scores = search(decoder, width, max_tokens, decoder.prepare(run.params), *padded)
    return [
        [
            Beam(run.tokenizer.decode(beam), tuple(beam.tolist()), float(score))
            for beam, score in zip(row_tokens, row_scores, strict=True)
        ]
        for row_tokens, row_scores in zip(np.asarray(tokens), np.asarray(scores), strict=True)
    ]
