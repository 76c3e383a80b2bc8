from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_extractor.data.tokenizers import BytesTokenizer
from jax_extractor.errors import InputError, UsageError
from jax_extractor.generation import (
    GenerationConfig,
    SamplingConfig,
    WindowDecoder,
    generate,
    make_decoder,
    stream,
)
from jax_extractor.generation.generate import CHUNK

LENGTH = 4
GREEDY = SamplingConfig(temperature=0.0)
PROMPTS = ["", "a", "Hi né", "a prompt longer than the context"]


def by_hand(writer, context: list[int], count: int):
    """Greedy tokens and log-probabilities from full forward passes, without padding."""
    context, tokens, log_probabilities = list(context), [], []
    for _ in range(count):
        logits = writer.full_pass(jnp.asarray([context[-LENGTH:]], jnp.int32))[0]
        tokens.append(int(jnp.argmax(logits)))
        log_probabilities.append(float(jax.nn.log_softmax(logits)[tokens[-1]]))
        context.append(tokens[-1])
    return tokens, log_probabilities


@pytest.mark.parametrize("kind", ["writer", "attention_writer"])
def test_greedy_is_the_argmax_of_the_full_forward_pass(kind, request):
    writer = request.getfixturevalue(kind)
    config = GenerationConfig(max_tokens=2 * LENGTH, sampling=GREEDY)
    decoder = WindowDecoder(writer.model)
    for prompt, found in zip(
        PROMPTS, generate(writer, PROMPTS, config, decoder=decoder), strict=True
    ):
        tokens, log_probabilities = by_hand(writer, (prompt or "\n").encode(), 2 * LENGTH)
        assert found.tokens == tuple(tokens)
        np.testing.assert_allclose(found.log_probabilities, log_probabilities, rtol=2e-5, atol=2e-6)
        assert found.prompt == prompt
        assert found.text == writer.tokenizer.decode(tokens)


def test_the_default_decoder_is_exact_within_the_context(writer):
    config = GenerationConfig(max_tokens=3, sampling=GREEDY)
    for prompt, found in zip(PROMPTS[:2], generate(writer, PROMPTS[:2], config), strict=True):
        assert found.tokens == tuple(by_hand(writer, (prompt or "\n").encode(), 3)[0])


def test_a_long_prompt_counts_by_its_last_tokens(writer):
    config, decoder = GenerationConfig(max_tokens=5), WindowDecoder(writer.model)
    long, short = generate(writer, [PROMPTS[3], PROMPTS[3][-LENGTH:]], config, decoder=decoder)
    assert long.tokens == short.tokens


def test_a_seed_gives_the_same_texts_in_any_batch(writer):
    config = GenerationConfig(max_tokens=20, samples=3, seed=5, batch_size=4)
    whole = generate(writer, PROMPTS, config)
    assert [(c.prompt, c.sample) for c in whole] == [(p, s) for p in PROMPTS for s in range(3)]
    assert len({c.tokens for c in whole}) == 12
    for other in (
        generate(writer, PROMPTS[::-1], config),
        generate(writer, PROMPTS[1:3], replace(config, batch_size=3)),
        generate(writer, PROMPTS[2:3], replace(config, samples=1)),
    ):
        expected = {(c.prompt, c.sample): c.tokens for c in whole}
        for completion in other:
            assert completion.tokens == expected[completion.prompt, completion.sample]
    assert generate(writer, PROMPTS, replace(config, seed=6))[0].tokens != whole[0].tokens


@pytest.mark.parametrize("max_tokens", [1, CHUNK, CHUNK + 1])
def test_max_tokens_is_met_exactly(writer, max_tokens):
    (found,) = generate(writer, ["a"], GenerationConfig(max_tokens=max_tokens))
    (longest,) = generate(writer, ["a"], GenerationConfig(max_tokens=2 * CHUNK))
    assert found.tokens == longest.tokens[:max_tokens]
    assert found.log_probabilities == longest.log_probabilities[:max_tokens]
    assert not found.stopped


def test_pieces_join_to_the_completions(writer):
    config = GenerationConfig(max_tokens=2 * CHUNK + 3, samples=2, batch_size=3)
    texts: dict[int, str] = {}
    completions = {}
    for piece in stream(writer, PROMPTS, config):
        assert piece.row not in completions
        texts[piece.row] = texts.get(piece.row, "") + piece.text
        if piece.completion:
            completions[piece.row] = piece.completion
    assert [completions[row] for row in range(8)] == generate(writer, PROMPTS, config)
    assert texts == {row: completion.text for row, completion in completions.items()}


class Said(NamedTuple):
    """How many tokens each row has said."""

    count: jax.Array


@dataclass(frozen=True)
class Parrot:
    """A decoder that says given bytes over and over, whatever the model."""

    data: bytes

    def prompt_width(self, longest):
        return longest

    def prepare(self, params):
        return params

    def prefill(self, weights, tokens, valid):
        return self._say(jnp.zeros(len(tokens), jnp.int32))

    def step(self, weights, state, tokens):
        return self._say(state.count + 1)

    def select(self, state, rows):
        return Said(state.count[rows])

    def _say(self, count):
        data = jnp.asarray(list(self.data))
        return 50 * jax.nn.one_hot(data[count % len(self.data)], 256), Said(count)


def says(data: bytes, config: GenerationConfig):
    writer = SimpleNamespace(model=None, params=(), tokenizer=BytesTokenizer())
    return list(stream(writer, ["x"], config, decoder=Parrot(data)))


def test_characters_split_over_chunks_come_whole():
    text = "aé—🙂"  # 10 bytes, so that chunks of 16 end inside characters
    pieces = says(text.encode(), GenerationConfig(max_tokens=50, sampling=GREEDY))
    assert "".join(piece.text for piece in pieces) == 5 * text
    assert len(pieces) == 4 and all("\ufffd" not in piece.text for piece in pieces)


def test_a_text_that_ends_inside_a_character_is_valid_utf8():
    pieces = says("🙂".encode(), GenerationConfig(max_tokens=6, sampling=GREEDY))
    assert pieces[-1].completion.text == "🙂\ufffd"


def test_a_stop_string_across_chunks_ends_text_and_tokens():
    data = b"0123456789abcdefSTOP later"
    config = GenerationConfig(max_tokens=100, sampling=GREEDY, stop=("nothing", "fST"))
    pieces = says(data, config)
    assert [piece.text for piece in pieces] == ["0123456789abcde", ""]
    completion = pieces[-1].completion
    assert completion.stopped and completion.text == "0123456789abcde"
    assert bytes(completion.tokens) == b"0123456789abcdefST"
    assert len(completion.log_probabilities) == len(completion.tokens)


def test_an_end_token_ends_the_text_before_it():
    config = GenerationConfig(max_tokens=100, sampling=GREEDY, end_token=ord("!"), stop=("cdx",))
    (piece,) = says(b"abcd!e", config)
    assert piece.completion.stopped and piece.completion.text == "abcd"
    assert bytes(piece.completion.tokens) == b"abcd!"
    with pytest.raises(UsageError, match="end_token=-1"):
        says(b"a", replace(config, end_token=-1))


def test_repetition_penalty_counts_prompt_and_text():
    # Logits are 50 for "x", which the prompt has, and 0 for all others: a large penalty leaves
    # 50/θ > 0 on "x"; with θ = 1 the text would be the same, so look at the log-probability too.
    config = GenerationConfig(
        max_tokens=3, sampling=SamplingConfig(temperature=1.0, repetition_penalty=1e6)
    )
    (piece,) = says(b"x", config)
    assert bytes(piece.completion.tokens) != b"xxx"
    assert min(piece.completion.log_probabilities) == pytest.approx(-50, abs=1e-3)


def test_nothing_is_compiled_anew_for_another_prompt(writer):
    class Counted(WindowDecoder):
        step = chex.assert_max_traces(WindowDecoder.step, n=1)

    decoder = Counted(writer.model)
    config = GenerationConfig(max_tokens=40)
    for prompt in PROMPTS:
        generate(writer, [prompt], config, decoder=decoder)
    generate(writer, ["once more"], replace(config, seed=9, stop=("e",)), decoder=decoder)


def test_equal_models_share_their_compilation(writer):
    assert make_decoder(writer.model) == make_decoder(writer.model.copy())
    assert hash(make_decoder(writer.model)) == hash(make_decoder(writer.model.copy()))


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", 0), ("samples", 0), ("batch_size", 0), ("seed", -1), ("seed", 2**31)],
)
def test_wrong_fields_are_named(writer, field, value):
    with pytest.raises(UsageError, match=f"^{field}={value}: choose"):
        stream(writer, ["a"], GenerationConfig(**{field: value}))


def test_other_bad_input_is_refused_before_any_text(writer):
    write = partial(stream, writer)
    with pytest.raises(UsageError, match=r"stop=.*none of them empty"):
        write(["a"], GenerationConfig(stop=("a", "")))
    with pytest.raises(UsageError, match="top_p=2"):
        write(["a"], GenerationConfig(sampling=SamplingConfig(top_p=2.0)))
    with pytest.raises(UsageError, match="prompts is empty"):
        write([])
    with pytest.raises(InputError, match="outside the bytes vocabulary"):
        write(["fine", "\ud800"])


def test_a_string_is_no_list_of_prompts(writer):
    with pytest.raises(UsageError, match=r"prompts='abc' is one string: give a list of them"):
        generate(writer, "abc")


def test_an_end_token_lies_in_the_vocabulary(writer):
    size = writer.tokenizer.vocab_size
    with pytest.raises(UsageError, match=f"end_token={size}: choose from 0 to {size - 1}"):
        generate(writer, ["a"], GenerationConfig(end_token=size))
