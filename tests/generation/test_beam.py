import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_extractor.errors import UsageError
from jax_extractor.generation import GenerationConfig, SamplingConfig, beam_search, generate

PROMPTS = ["ab", "c"]


def next_log_probabilities(writer, tokens):
    logits = writer.full_pass(jnp.asarray(tokens, jnp.int32))
    return np.asarray(jax.nn.log_softmax(logits), np.float64)


def test_a_beam_as_wide_as_the_vocabulary_finds_the_best_of_all_pairs(writer):
    found = beam_search(writer, PROMPTS, width=256, max_tokens=2)
    for prompt, beams in zip(PROMPTS, found, strict=True):
        context = list(prompt.encode())
        first = next_log_probabilities(writer, [context])[0]
        second = next_log_probabilities(writer, [[*context, token] for token in range(256)])
        total = first[:, None] + second
        best = np.argsort(-total, axis=None)[:256]
        np.testing.assert_allclose(
            [beam.log_probability for beam in beams], total.flat[best], rtol=1e-5
        )
        assert beams[0].tokens == tuple(divmod(int(best[0]), 256))
        for beam in beams[:20]:
            assert beam.log_probability == pytest.approx(total[beam.tokens], rel=1e-5)
            assert beam.text == writer.tokenizer.decode(beam.tokens)


def test_a_beam_of_one_is_greedy(writer):
    config = GenerationConfig(max_tokens=6, sampling=SamplingConfig(temperature=0.0))
    greedy = generate(writer, PROMPTS, config)
    for (beam,), completion in zip(
        beam_search(writer, PROMPTS, width=1, max_tokens=6), greedy, strict=True
    ):
        assert beam.tokens == completion.tokens
        assert beam.log_probability == pytest.approx(sum(completion.log_probabilities), rel=1e-5)


def test_beams_differ_and_come_best_first(writer):
    (beams,) = beam_search(writer, ["x"], width=5, max_tokens=4)
    scores = [beam.log_probability for beam in beams]
    assert scores == sorted(scores, reverse=True)
    assert len({beam.tokens for beam in beams}) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, "width=0: choose from 1 to 256"),
        ({"width": 257}, "width=257"),
        ({"max_tokens": 0}, "max_tokens=0"),
    ],
)
def test_wrong_fields_are_named(writer, options, message):
    with pytest.raises(UsageError, match=message):
        beam_search(writer, ["a"], **options)
