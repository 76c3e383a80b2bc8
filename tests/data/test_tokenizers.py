import json
import subprocess
import sys

import numpy as np
import pytest
import tokenizers as huggingface
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_extractor.data.tokenizers import BPETokenizer, BytesTokenizer, Tokenizer, load_tokenizer
from jax_extractor.errors import InputError, UsageError

SAMPLE = "The row vectors of the layer meet the weights; größer, naïve, 中文, 𝄞.\n" * 50
TOKENIZERS = {"bytes": BytesTokenizer(), "bpe": BPETokenizer.train([SAMPLE], 300)}

each = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@each
@settings(deadline=None)
@given(text=texts)
def test_every_text_makes_the_round_trip_and_its_bytes_are_counted(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.byte_lengths[ids].sum() == len(text.encode())


@each
def test_a_stream_is_encoded_piece_by_piece(tokenizer):
    pieces = [f"{SAMPLE[:n]} {n}\n" for n in range(0, 1500, 7)]
    streamed = list(tokenizer.encode_stream(iter(pieces)))
    assert len(streamed) == len(pieces) > 200
    for piece, ids in zip(pieces, streamed, strict=True):
        assert ids.dtype == np.int32
        np.testing.assert_array_equal(ids, tokenizer.encode(piece))


@each
@settings(deadline=None)
@given(data=st.data())
def test_any_tokens_stream_to_what_they_decode_to_at_once(tokenizer, data):
    last = tokenizer.vocab_size - 1
    ids = data.draw(st.lists(st.integers(0, last), max_size=40))
    decoder = tokenizer.incremental_decoder()
    streamed = "".join(decoder.feed(token) for token in ids) + decoder.flush()
    assert streamed == tokenizer.decode(np.array(ids, np.int64))
    assert decoder.flush() == ""  # ready for the next text


@each
def test_streaming_gives_whole_characters_only(tokenizer):
    text = "é€𝄞 naïve"
    decoder = tokenizer.incremental_decoder()
    pieces = [decoder.feed(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert decoder.flush() == ""


def test_an_unfinished_character_is_held_back_until_the_end():
    decoder = BytesTokenizer().incremental_decoder()
    assert [decoder.feed(token) for token in b"a\xe2\x82"] == ["a", "", ""]
    assert decoder.flush() == "\ufffd"
    assert decoder.feed(ord("b")) == "b"


def test_bytes_are_the_bytes_of_utf8():
    tokenizer = BytesTokenizer()
    assert tokenizer.vocab_size == 256
    assert tokenizer.dtype == np.uint8
    assert tokenizer.encode("aé\n").tolist() == [0x61, 0xC3, 0xA9, 0x0A]
    assert tokenizer.decode([0x61, 0xFF]) == "a\ufffd"
    assert tokenizer.encode("").shape == (0,)


def test_bpe_has_every_byte_and_learns_frequent_words():
    tokenizer = TOKENIZERS["bpe"]
    assert tokenizer.vocab_size == 300 == len(tokenizer.byte_lengths)
    assert {bytes([value]) for value in range(256)} < set(tokenizer.token_bytes)
    assert len(set(tokenizer.token_bytes)) == 300
    assert tokenizer.dtype == np.uint16
    assert len(tokenizer.encode(" the")) == 1
    assert len(tokenizer.encode(SAMPLE)) < len(SAMPLE) / 2


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.uint32)],
)
def test_ids_are_stored_in_the_smallest_type(vocab_size, dtype):
    tokenizer = BytesTokenizer()
    Tokenizer.__init__(tokenizer, [b"x"] * vocab_size)
    assert tokenizer.dtype == dtype


def test_bpe_decodes_like_the_library():
    tokenizer = TOKENIZERS["bpe"]
    model = huggingface.Tokenizer.from_str(json.loads(tokenizer.to_json())["state"])
    model.decoder = huggingface.decoders.ByteLevel()
    ids = np.random.default_rng(0).integers(0, tokenizer.vocab_size, 300)
    assert tokenizer.decode(ids) == model.decode(ids.tolist(), skip_special_tokens=False)


def test_bpe_of_a_short_text_is_smaller_than_asked():
    tokenizer = BPETokenizer.train(["aaab"], 1000)
    assert 256 < tokenizer.vocab_size < 265
    assert tokenizer.decode(tokenizer.encode("aaab")) == "aaab"


def test_bpe_learns_from_a_stream_the_same_in_every_process():
    program = (
        "from jax_extractor.data.tokenizers import BPETokenizer\n"
        "lines = (f'word{n % 97} and {n * n} more\\n' for n in range(5000))\n"
        "print(BPETokenizer.train(lines, 500).to_json())"
    )
    outputs = {
        subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
        for _ in range(2)
    }
    assert len(outputs) == 1
    assert len(json.loads(outputs.pop())["state"]) > 5000


@each
@pytest.mark.parametrize("place", ["file", "folder"])
def test_saved_tokenizers_come_back_equal(tokenizer, place, tmp_path):
    path = tmp_path / "saved.json" if place == "file" else tmp_path
    tokenizer.save(path)
    for loaded in (load_tokenizer(path), Tokenizer.load(path)):
        assert type(loaded) is type(tokenizer)
        assert loaded.token_bytes == tokenizer.token_bytes
        assert loaded.to_json() == tokenizer.to_json()
        np.testing.assert_array_equal(loaded.encode(SAMPLE), tokenizer.encode(SAMPLE))


@each
def test_half_a_surrogate_pair_is_named(tokenizer):
    with pytest.raises(InputError, match=r"'\\udcff' \(U\+DCFF\) at position 2 is outside the b"):
        tokenizer.encode("ab\udcff")


def test_a_character_outside_a_small_alphabet_is_named():
    model = huggingface.Tokenizer(huggingface.models.BPE())
    model.pre_tokenizer = huggingface.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = huggingface.trainers.BpeTrainer(vocab_size=60, show_progress=False)
    model.train_from_iterator(["plain ASCII letters"], trainer)
    tokenizer = BPETokenizer(model)
    assert tokenizer.decode(tokenizer.encode("plain letters")) == "plain letters"
    with pytest.raises(InputError, match=r"'\\xe9' \(U\+00E9\) at position 4 is outside the bpe"):
        tokenizer.encode("ASCIé")


def test_files_that_are_no_tokenizer_get_one_clear_line(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(InputError, match="no tokenizer at"):
        load_tokenizer(path)
    for text in ["", "{}", "[]", '{"kind": "bpe"']:
        path.write_text(text)
        with pytest.raises(InputError, match="is not a saved tokenizer"):
            load_tokenizer(path)
    path.write_text('{"kind": "words", "state": ""}')
    with pytest.raises(UsageError, match="unknown tokenizer 'words': choose one of bpe, bytes"):
        load_tokenizer(path)
    path.write_text('{"kind": "bpe", "state": "{}"}')
    with pytest.raises(InputError, match="is not a saved tokenizer"):
        load_tokenizer(path)
