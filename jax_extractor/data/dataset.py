"""A corpus as tokens on disk: built once, then memory-mapped, whatever its size."""

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from jax_extractor.data.corpora import SOURCES, Corpus, open_corpus
from jax_extractor.data.tokenizers import (
    TOKENIZERS,
    BPETokenizer,
    BytesTokenizer,
    Tokenizer,
    load_tokenizer,
)
from jax_extractor.errors import InputError, UsageError, unknown_name
from jax_extractor.files import exclusive, write_atomic, write_blocks, writing_errors

FORMAT = 1  # raise it when the same configuration would give other files
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class DataConfig:
    """Which text, and how it becomes tokens."""

    source: str = "stdlib"
    """Where text comes from: stdlib (documentation of the running Python) or files."""
    files: tuple[str, ...] = ()
    """UTF-8 files and globs, read in sorted order (source files only)."""
    tokenizer: Literal["bytes", "bpe"] = "bytes"
    """One token per byte, or byte pairs learned from the train part."""
    vocab_size: int = 4096
    """Largest number of tokens to learn (tokenizer bpe only)."""
    validation_fraction: float = 0.05
    """Share of the text, taken from its end, that is never trained on."""

    def check(self) -> None:
        """Raise UsageError for a field that no corpus could satisfy."""
        if self.source not in SOURCES:
            raise unknown_name("data.source", self.source, SOURCES)
        if self.tokenizer not in TOKENIZERS:
            raise unknown_name("data.tokenizer", self.tokenizer, TOKENIZERS)
        if self.tokenizer == "bpe" and not 257 <= self.vocab_size <= 1 << 31:
            raise UsageError(
                f"data.vocab_size={self.vocab_size} leaves no room beside the 256 bytes: "
                "choose 257 or more, or --data.tokenizer bytes"
            )
        if not 0 < self.validation_fraction < 1:
            raise UsageError(
                f"data.validation_fraction={self.validation_fraction} leaves one split empty: "
                "choose a number between 0 and 1, such as 0.05"
            )


@dataclass(frozen=True)
class Dataset:
    """Two ranges of one memory-mapped token stream, and the tokenizer that made it."""

    tokens: np.ndarray
    """(N,) unsigned integers on disk, np.memmap: the train tokens, then the validation tokens."""
    train_tokens: int
    """How many of the tokens are for training."""
    train_bytes: int
    """Bytes of text in the train part."""
    validation_bytes: int
    """Bytes of text in the validation part."""
    tokenizer: Tokenizer
    """From text to these tokens and back."""
    fingerprint: str
    """SHA-256 of text, split and tokenizer, in hexadecimal: equal wherever the files lie."""

    @property
    def train(self) -> np.ndarray:
        """The train tokens, memory-mapped."""
        return self.tokens[: self.train_tokens]

    @property
    def validation(self) -> np.ndarray:
        """The validation tokens, memory-mapped."""
        return self.tokens[self.train_tokens :]

    @property
    def vocab_size(self) -> int:
        """V, the number of token ids."""
        return self.tokenizer.vocab_size

    def split(self, name: str) -> np.ndarray:
        """The tokens of split `name`: train or validation."""
        if name not in SPLITS:
            raise unknown_name("split", name, SPLITS)
        return self.train if name == "train" else self.validation

    def check_length(self, length: int) -> None:
        """Raise InputError unless windows of `length` inputs and their targets fit."""
        train, validation = len(self.train), len(self.validation)
        if train <= length:
            raise InputError(
                f"the corpus is too short: {train} train tokens, but max_length={length} needs "
                f"at least {length + 1}: give more text or lower --model.max-length"
            )
        if validation < 2:
            raise InputError(
                f"the corpus is too short: {validation} validation tokens, but at least 2 are "
                "needed: give more text or raise --data.validation-fraction"
            )


def prepare(config: DataConfig, directory, *, max_length: int = 1) -> Dataset:
    """The tokens of `config`, opened from `directory` or built there.

    A build is a folder named after everything it depends on (configuration; path, size and
    modification time of each file), and appears there in one move: it is whole or absent, however
    its builder ends, and readers of an older build keep theirs.

    Raises UsageError for wrong fields, InputError for text that cannot be used, is too short for
    windows of `max_length`, or cannot be stored.
    """
    config.check()
    directory = Path(directory)
    corpus = open_corpus(config.source, config.files, directory)
    identity = corpus.identity()
    build = directory / _build_name(config, identity)
    dataset = _open(build)
    if dataset is None:
        with writing_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            with exclusive(directory / ".lock"):
                if _open(build) is None:  # nobody was faster
                    _build(config, corpus, identity, build)
        dataset = _open(build)
    if dataset is None:
        raise InputError(f"{build} is damaged: remove it and run again")
    dataset.check_length(max_length)
    return dataset


def _build_name(config: DataConfig, identity: list) -> str:
    fields = dataclasses.asdict(config) | {"files": identity}
    if config.tokenizer == "bytes":
        del fields["vocab_size"]
    return f"tokens-{_sha256(FORMAT, fields)[:16]}"


def _sha256(*values) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _open(build: Path) -> Dataset | None:
    """The dataset in folder `build`; None where it is absent or damaged."""
    try:
        header = json.loads((build / "tokens.json").read_bytes())
        tokens = np.memmap(build / "tokens.bin", np.dtype(header["dtype"]), "r")
        tokenizer = load_tokenizer(build)
    except (OSError, ValueError, KeyError):
        return None
    if len(tokens) != header["train_tokens"] + header["validation_tokens"]:
        return None
    return Dataset(
        tokens=tokens,
        train_tokens=header["train_tokens"],
        train_bytes=header["train_bytes"],
        validation_bytes=header["validation_bytes"],
        tokenizer=tokenizer,
        fingerprint=header["fingerprint"],
    )


def _build(config: DataConfig, corpus: Corpus, identity: list, build: Path) -> None:
    """Make folder `build`; the caller holds the lock, so that unfinished folders are nobody's."""
    for unfinished in [*build.parent.glob(".building-*"), build]:
        shutil.rmtree(unfinished, ignore_errors=True)
    digest = corpus.digest()  # reads all, so bad UTF-8 shows before any work
    size = corpus.size()
    boundary = corpus.character_start(size - round(size * config.validation_fraction))
    if not 0 < boundary < size:
        raise InputError(
            f"the corpus is too short: {size} bytes cannot be split by data.validation_fraction="
            f"{config.validation_fraction}: give more text"
        )
    if config.tokenizer == "bpe":
        tokenizer: Tokenizer = BPETokenizer.train(corpus.text(0, boundary), config.vocab_size)
    else:
        tokenizer = BytesTokenizer()
    temporary = Path(tempfile.mkdtemp(prefix=".building-", dir=build.parent))
    try:
        train, validation = _write_tokens(temporary / "tokens.bin", corpus, boundary, tokenizer)
        tokenizer.save(temporary)
        header = {
            "dtype": tokenizer.dtype.name,
            "train_tokens": train,
            "validation_tokens": validation,
            "train_bytes": boundary,
            "validation_bytes": size - boundary,
            "vocab_size": tokenizer.vocab_size,
            "fingerprint": _sha256(digest, boundary, tokenizer.to_json()),
            "files": identity,
        }
        write_atomic(temporary / "tokens.json", [json.dumps(header, indent=1).encode()])
        if corpus.identity() != identity:
            raise InputError("the files of the corpus changed while they were read: run again")
        temporary.chmod(0o755)  # mkdtemp's mode is for its owner alone
        os.replace(temporary, build)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_tokens(
    path: Path, corpus: Corpus, boundary: int, tokenizer: Tokenizer
) -> tuple[int, int]:
    """Write the tokens of both parts, each encoded by itself; the number in each."""
    counts = [0, 0]

    def blocks() -> Iterator[bytes]:
        for part, (start, stop) in enumerate([(0, boundary), (boundary, None)]):
            for ids in tokenizer.encode_stream(corpus.text(start, stop)):
                counts[part] += len(ids)
                yield ids.astype(tokenizer.dtype).tobytes()

    with open(path, "wb") as file:
        write_blocks(file, blocks())
    return counts[0], counts[1]
