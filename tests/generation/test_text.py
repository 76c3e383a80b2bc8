import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_extractor.data.tokenizers import BytesTokenizer
from jax_extractor.errors import InputError
from jax_extractor.generation.text import TextStream, encode_prompt, pad_prompts

BYTES = BytesTokenizer()


def written(data: bytes, stop=()) -> list[str]:
    """What a stream gives out for each byte, and at its end."""
    stream, pieces = TextStream(BYTES, stop), []
    for token in data:
        pieces.append(stream.feed(token))
        if stream.stopped:
            return pieces
    return [*pieces, stream.finish()]


def test_an_empty_prompt_is_a_line_break():
    assert encode_prompt(BYTES, "").tolist() == [10]
    assert encode_prompt(BYTES, "é").tolist() == [0xC3, 0xA9]


def test_a_prompt_outside_the_vocabulary_is_refused():
    with pytest.raises(InputError, match=r"'\\udcff' \(U\+DCFF\) at position 1"):
        encode_prompt(BYTES, "a\udcff")


def test_prompts_are_padded_on_the_left_and_cut_to_their_last_tokens():
    tokens, valid = pad_prompts([np.array([1, 2]), np.array([3, 4, 5, 6]), np.array([7])], 3)
    assert tokens.tolist() == [[0, 1, 2], [4, 5, 6], [0, 0, 7]]
    assert valid.tolist() == [[False, True, True], [True] * 3, [False, False, True]]


def test_a_character_appears_with_its_last_byte():
    assert written("aé🙂".encode()) == ["a", "", "é", "", "", "", "🙂", ""]


def test_an_unfinished_or_broken_character_is_replaced():
    assert written(b"a\xf0\x9f") == ["a", "", "", "\ufffd"]
    assert "".join(written(b"\xc3a\xff")) == "\ufffda\ufffd"


def test_what_may_begin_a_stop_string_is_held_back():
    assert written(b"xENx", ["END"]) == ["x", "", "", "ENx", ""]
    assert written(b"xEND", ["END"]) == ["x", "", "", ""]
    assert written(b"xEN", ["END"]) == ["x", "", "", "EN"]


def test_a_stop_string_that_overlaps_its_own_beginning():
    assert "".join(written(b"aaaab", ["aab"])) == "aa"


def test_the_first_of_several_stop_strings_ends_the_text():
    assert "".join(written(b"one two three", ["three", "two"])) == "one "
    # of two that end at once, the earlier begins the end
    assert "".join(written(b"abcd", ["cd", "bcd"])) == "a"


@given(st.binary(max_size=40))
def test_pieces_join_to_the_whole_text(data):
    assert "".join(written(data)) == BYTES.decode(list(data))
    "".join(written(data)).encode("utf-8")


@given(st.text("ab🙂", max_size=30), st.text("ab🙂", min_size=1, max_size=4))
def test_the_text_ends_before_the_first_stop_string(text, stop):
    assert "".join(written(text.encode(), [stop])) == text.split(stop)[0]
