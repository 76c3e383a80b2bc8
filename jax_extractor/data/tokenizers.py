"""Text to token ids and back: bytes, or byte pairs (BPE) learned from the corpus.

A token is a fixed string of bytes in both, so decoding, streaming and the count of bytes per
token are shared; a tokenizer adds only how text is cut.
"""

import abc
import codecs
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, SupportsInt

import numpy as np

from jax_extractor.errors import InputError, unknown_name
from jax_extractor.files import write_atomic

PIECES_AT_ONCE = 64  # a few MB of text; enough for the cores of one host
BYTES = tuple(bytes([value]) for value in range(256))


class Tokenizer(abc.ABC):
    """Cuts text into tokens; token number v stands for the bytes `token_bytes[v]`."""

    kind: ClassVar[str]

    def __init__(self, token_bytes: Sequence[bytes]):
        self.token_bytes = tuple(token_bytes)
        self.byte_lengths = np.array([len(token) for token in token_bytes], np.int64)

    @property
    def vocab_size(self) -> int:
        """V, the number of token ids."""
        return len(self.token_bytes)

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned integer type that holds every token id."""
        return np.min_scalar_type(self.vocab_size - 1)

    def encode(self, text: str) -> np.ndarray:
        """The token ids of `text`, (T,) int32.

        Raises InputError that names the first character without a token, such as half of a
        surrogate pair, or a letter outside the alphabet of a BPE vocabulary from elsewhere.
        """
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise self._unknown_character(text, error.start) from None
        ids = self._encode(text, data)
        if self.byte_lengths[ids].sum() != len(data):
            known = set(self.token_bytes)
            for position, character in enumerate(text):
                if any(bytes([value]) not in known for value in character.encode()):
                    raise self._unknown_character(text, position)
        return ids

    def encode_stream(self, pieces: Iterator[str]) -> Iterator[np.ndarray]:
        """The token ids of each piece of a text, as `encode` gives them."""
        return map(self.encode, pieces)

    def decode(self, ids) -> str:
        """The text of token `ids` (T,); bytes that are not UTF-8 become U+FFFD."""
        data = b"".join([self.token_bytes[index] for index in np.asarray(ids).tolist()])
        return data.decode("utf-8", "replace")

    def incremental_decoder(self) -> "IncrementalDecoder":
        """A decoder that is fed token by token."""
        return IncrementalDecoder(self.token_bytes)

    def save(self, path) -> None:
        """Write the tokenizer to `path`, a file or a folder (tokenizer.json), whole or not."""
        write_atomic(_file(path), [self.to_json().encode()])

    def to_json(self) -> str:
        """All there is to know about this tokenizer: equal text, equal tokens."""
        return json.dumps({"kind": self.kind, "state": self._state()})

    @staticmethod
    def load(path) -> "Tokenizer":
        """The tokenizer that `save` wrote to `path`; InputError where there is none."""
        return load_tokenizer(path)

    @abc.abstractmethod
    def _encode(self, text: str, data: bytes) -> np.ndarray:
        """Token ids (T,) int32 of `text`, which is `data` in UTF-8."""

    @abc.abstractmethod
    def _state(self) -> str:
        """What `load` needs, besides the kind."""

    @classmethod
    @abc.abstractmethod
    def _from_state(cls, state: str) -> "Tokenizer":
        """The tokenizer whose `_state` this is."""

    def _unknown_character(self, text: str, position: int) -> InputError:
        character = text[position]
        return InputError(
            f"character {character!a} (U+{ord(character):04X}) at position {position} is outside "
            f"the {self.kind} vocabulary: remove it from the text"
        )


class IncrementalDecoder:
    """Gives text as tokens come, and holds back a character until its last byte is there."""

    def __init__(self, token_bytes: Sequence[bytes]):
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: SupportsInt) -> str:
        """The text that `token` completes, often empty inside a character."""
        return self._utf8.decode(self._token_bytes[int(token)])

    def flush(self) -> str:
        """What is held back at the end: U+FFFD for an unfinished character, otherwise nothing."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


class BytesTokenizer(Tokenizer):
    """One token per byte of UTF-8: V=256, nothing to learn, every text has one reading."""

    kind = "bytes"

    def __init__(self) -> None:
        super().__init__(BYTES)

    def _encode(self, text: str, data: bytes) -> np.ndarray:
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def _state(self) -> str:
        return ""

    @classmethod
    def _from_state(cls, state: str) -> "BytesTokenizer":
        return cls()


class BPETokenizer(Tokenizer):
    """Byte-level byte pair encoding (Sennrich et al. 2016), by the `tokenizers` library."""

    kind = "bpe"

    def __init__(self, model) -> None:
        """`model` is a byte-level `tokenizers.Tokenizer`."""
        vocabulary = model.get_vocab(with_added_tokens=True)
        names = sorted(vocabulary, key=vocabulary.__getitem__)
        values = {letter: value for value, letter in enumerate(_byte_letters())}
        super().__init__([bytes(values[letter] for letter in name) for name in names])
        self._model = model

    @classmethod
    def train(cls, pieces: Iterable[str], vocab_size: int) -> "BPETokenizer":
        """Learn at most `vocab_size` tokens, the 256 bytes among them, from a stream of text.

        A short text may not have enough pairs; then the vocabulary is smaller. The same text
        gives the same vocabulary.
        """
        import tokenizers  # here, so that the default needs it neither installed nor loaded

        model = tokenizers.Tokenizer(tokenizers.models.BPE())
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size, initial_alphabet=sorted(_byte_letters()), show_progress=False
        )
        model.train_from_iterator(pieces, trainer)
        return cls(model)

    def encode_stream(self, pieces: Iterator[str]) -> Iterator[np.ndarray]:
        """The token ids of each piece of a text, computed on all cores."""
        while batch := list(itertools.islice(pieces, PIECES_AT_ONCE)):
            for encoding in self._model.encode_batch_fast(batch):
                yield np.array(encoding.ids, np.int32)

    def _encode(self, text: str, data: bytes) -> np.ndarray:
        return np.array(self._model.encode(text).ids, np.int32)

    def _state(self) -> str:
        return self._model.to_str()

    @classmethod
    def _from_state(cls, state: str) -> "BPETokenizer":
        import tokenizers

        return cls(tokenizers.Tokenizer.from_str(state))


def _byte_letters() -> str:
    """The letter that stands for each byte 0…255 in a byte-level vocabulary.

    A printable byte is its own Latin-1 letter; the others follow from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(value if value in printable else next(others)) for value in range(256))


TOKENIZERS: dict[str, type[Tokenizer]] = {"bpe": BPETokenizer, "bytes": BytesTokenizer}


def load_tokenizer(path) -> Tokenizer:
    """The tokenizer saved in `path`, a file or a folder; InputError for a file that is none."""
    path = _file(path)
    try:
        saved = json.loads(path.read_bytes())
        if saved["kind"] not in TOKENIZERS:
            raise unknown_name("tokenizer", saved["kind"], TOKENIZERS)
        return TOKENIZERS[saved["kind"]]._from_state(saved["state"])
    except FileNotFoundError:
        raise InputError(
            f"no tokenizer at {path}: run the same train command again to write it anew"
        ) from None
    except InputError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise InputError(f"{path} is not a saved tokenizer ({error}): restore the file") from error


def _file(path) -> Path:
    path = Path(path)
    return path / "tokenizer.json" if path.is_dir() else path
