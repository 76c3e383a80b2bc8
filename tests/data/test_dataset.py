import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from jax_extractor.data import DataConfig, prepare, train_batch
from jax_extractor.data import dataset as module
from jax_extractor.errors import InputError, UsageError

PROSE = "Row vectors meet weights, größer and größer; 中文 𝄞.\n"


def build_folders(directory):
    return sorted(directory.glob("tokens-*"))


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_a_file_of_several_megabytes_is_memory_mapped_and_complete(tmp_path, book, tokenizer):
    words = np.array(["extractor ", "attention ", "größer ", "vector ", "row\n", "中文 ", "𝄞 "])
    text = "".join(words[np.random.default_rng(0).integers(0, len(words), 300_000)])
    config = DataConfig(**book(text), tokenizer=tokenizer, vocab_size=300)
    dataset = prepare(config, tmp_path / "data", max_length=256)
    data = text.encode()
    assert len(data) > 2_000_000
    assert isinstance(dataset.tokens, np.memmap)
    assert not dataset.tokens.flags.writeable
    for split in (dataset.train, dataset.validation):
        assert isinstance(split, np.memmap)
        assert split.dtype == (np.uint8 if tokenizer == "bytes" else np.uint16)
    assert dataset.tokens.size == dataset.train.size + dataset.validation.size
    assert dataset.train_bytes + dataset.validation_bytes == len(data)
    assert dataset.tokenizer.decode(dataset.train).encode() == data[: dataset.train_bytes]
    assert dataset.tokenizer.decode(dataset.validation).encode() == data[dataset.train_bytes :]
    assert dataset.validation_bytes == pytest.approx(0.05 * len(data), abs=4)
    assert dataset.vocab_size == (256 if tokenizer == "bytes" else 300)


@pytest.mark.parametrize("fraction", [0.05, 0.31, 0.5, 0.9])
def test_the_split_is_the_same_whatever_the_tokenizer_and_keeps_characters_whole(
    tmp_path, book, fraction
):
    for shift in range(4):
        text = "x" * shift + "𝄞中é" * 500
        fields = book(text) | {"validation_fraction": fraction}
        bytes_ = prepare(DataConfig(**fields), tmp_path / "data")
        bpe = prepare(DataConfig(**fields, tokenizer="bpe", vocab_size=260), tmp_path / "data")
        assert bytes_.train_bytes == bpe.train_bytes == bytes_.train.size
        for dataset in (bytes_, bpe):
            parts = [dataset.tokenizer.decode(part) for part in (dataset.train, dataset.validation)]
            assert "\ufffd" not in "".join(parts)
            assert "".join(parts) == text
        share = bytes_.validation_bytes / len(text.encode())
        assert share == pytest.approx(fraction, abs=4 / len(text.encode()))


def test_nothing_of_the_validation_part_is_learned_or_drawn(tmp_path, book):
    letters, digits = "abcdefghi " * 2000, "0123456789" * 400
    fields = book(letters + digits) | {"validation_fraction": 4000 / 24000}
    dataset = prepare(DataConfig(**fields, tokenizer="bpe", vocab_size=300), tmp_path / "data")
    tokens = dataset.tokenizer.token_bytes
    assert all(len(token) == 1 for token in tokens if set(token) & set(b"0123456789"))
    assert dataset.tokenizer.decode(dataset.validation) == digits
    for step in range(50):
        batch = train_batch(dataset, seed=0, step=step, batch_size=32, length=64)
        drawn = np.unique([batch.inputs, batch.targets])
        assert not set(b"".join(tokens[token] for token in drawn)) & set(b"0123456789")


def test_the_tokens_of_the_standard_library(stdlib_bytes, stdlib_bpe, stdlib_directory):
    (path,) = stdlib_directory.glob("stdlib-*.txt")
    data = path.read_bytes()
    assert stdlib_bytes.tokens.tobytes() == data
    assert stdlib_bytes.train_bytes == stdlib_bpe.train_bytes
    assert stdlib_bytes.train_bytes == pytest.approx(0.95 * len(data), abs=4)
    assert stdlib_bpe.tokenizer.decode(stdlib_bpe.tokens).encode() == data
    assert stdlib_bpe.tokenizer.byte_lengths[stdlib_bpe.tokens].sum() == len(data)
    assert len(data) / stdlib_bpe.tokens.size > 2.5  # bytes per token
    assert stdlib_bytes.fingerprint != stdlib_bpe.fingerprint


def test_a_second_call_opens_what_the_first_built(tmp_path, book, monkeypatch):
    config = DataConfig(**book(PROSE * 100))
    first = prepare(config, tmp_path / "data")
    monkeypatch.delattr(module, "_build")
    second = prepare(config, tmp_path / "data")
    np.testing.assert_array_equal(first.tokens, second.tokens)
    assert first.fingerprint == second.fingerprint
    assert second.tokens.filename == first.tokens.filename


def test_other_fields_or_files_are_built_anew_and_readers_keep_theirs(tmp_path, book):
    config = DataConfig(**book(PROSE * 100), tokenizer="bpe", vocab_size=270)
    first = prepare(config, tmp_path / "data")
    kept = first.tokens.copy()
    variants = [
        replace(config, vocab_size=280),
        replace(config, validation_fraction=0.2),
        replace(config, tokenizer="bytes"),
    ]
    others = [prepare(variant, tmp_path / "data") for variant in variants]
    book(PROSE.upper() * 100)
    others.append(prepare(config, tmp_path / "data"))
    assert len({dataset.fingerprint for dataset in [first, *others]}) == 5
    assert others[-1].tokenizer.decode(others[-1].tokens) == PROSE.upper() * 100
    np.testing.assert_array_equal(first.tokens, kept)


def test_a_touched_file_is_built_anew_with_the_same_fingerprint(tmp_path, book):
    config = DataConfig(**book(PROSE * 100))
    first = prepare(config, tmp_path / "data")
    os.utime(config.files[0], ns=(1, 1))
    second = prepare(config, tmp_path / "data")
    assert second.tokens.filename != first.tokens.filename
    assert second.fingerprint == first.fingerprint


def test_fields_that_do_not_matter_build_nothing(tmp_path, book):
    config = DataConfig(**book(PROSE * 100))
    prepare(config, tmp_path / "data")
    prepare(replace(config, vocab_size=1000), tmp_path / "data")
    assert len(build_folders(tmp_path / "data")) == 1


KILLED = """
import os, signal, sys
from jax_extractor.data import DataConfig, prepare
from jax_extractor.data import {module} as module
original, left = module.{name}, [{calls}]
def killed(*arguments):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments)
module.{name} = killed
prepare(DataConfig(source="files", files=(sys.argv[1],)), sys.argv[2])
"""


@pytest.mark.parametrize(
    ("place", "calls"),
    [
        ("tokenizers.BytesTokenizer._encode", 2),
        ("dataset.write_atomic", 0),
        ("dataset.os.replace", 2),
    ],
)
def test_a_builder_killed_anywhere_leaves_a_state_that_rebuilds(tmp_path, book, place, calls):
    text = PROSE * 4000
    config = DataConfig(**book(text))
    name, _, attribute = place.partition(".")
    program = KILLED.format(module=name, name=attribute, calls=calls)
    arguments = [sys.executable, "-c", program, config.files[0], str(tmp_path / "data")]
    assert subprocess.run(arguments).returncode == -signal.SIGKILL
    assert not build_folders(tmp_path / "data")
    assert list((tmp_path / "data").glob(".building-*"))
    dataset = prepare(config, tmp_path / "data")
    assert dataset.tokens.tobytes() == text.encode()
    assert not list((tmp_path / "data").glob(".building-*"))


@pytest.mark.parametrize("damage", ["tokens.bin", "tokens.json", "tokenizer.json", "cut", "empty"])
def test_a_damaged_build_is_built_anew(tmp_path, book, damage):
    text = PROSE * 100
    config = DataConfig(**book(text))
    prepare(config, tmp_path / "data")
    (build,) = build_folders(tmp_path / "data")
    if damage in ("cut", "empty"):
        os.truncate(build / "tokens.bin", 100 if damage == "cut" else 0)
    else:
        (build / damage).unlink()
    assert prepare(config, tmp_path / "data").tokens.tobytes() == text.encode()


def test_builders_at_the_same_time_agree(tmp_path, book):
    text = PROSE * 5_000
    config = DataConfig(**book(text), tokenizer="bpe", vocab_size=300)
    program = (
        "import sys\nfrom jax_extractor.data import DataConfig, prepare\n"
        "c = DataConfig(source='files', files=(sys.argv[1],), tokenizer='bpe', vocab_size=300)\n"
        "print(prepare(c, sys.argv[2]).fingerprint)"
    )
    arguments = [sys.executable, "-c", program, config.files[0], str(tmp_path / "data")]
    running = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = [process.communicate()[0].strip() for process in running]
    dataset = prepare(config, tmp_path / "data")
    assert printed == [dataset.fingerprint] * 3
    assert len(build_folders(tmp_path / "data")) == 1
    assert dataset.tokenizer.decode(dataset.tokens) == text


def test_the_header_describes_the_tokens(tmp_path, book):
    config = DataConfig(**book("a" * 1000))
    dataset = prepare(config, tmp_path / "data")
    (build,) = build_folders(tmp_path / "data")
    header = json.loads((build / "tokens.json").read_text())
    assert header["files"][0][:2] == [str(tmp_path / "book.txt"), 1000]
    assert {name: header[name] for name in ("dtype", "train_tokens", "validation_bytes")} == {
        "dtype": "uint8",
        "train_tokens": 950,
        "validation_bytes": 50,
    }
    assert header["fingerprint"] == dataset.fingerprint


@pytest.mark.parametrize(
    ("text", "fields", "length", "message"),
    [
        ("x" * 100, {}, 100, r"95 train tokens, but max_length=100 needs at least 101: .*lower"),
        ("x" * 20, {}, 4, r"1 validation tokens, .*--data.validation-fraction"),
        ("x", {}, 1, r"1 bytes cannot be split by data.validation_fraction=0.05"),
        ("𝄞", {"validation_fraction": 0.5}, 1, "4 bytes cannot be split"),
        (b"fine so far \xff", {}, 1, "not UTF-8: byte 0xff at offset 12"),
    ],
)
def test_text_that_cannot_be_used_gets_one_clear_line(
    tmp_path, book, text, fields, length, message
):
    with pytest.raises(InputError, match=message) as error:
        prepare(DataConfig(**book(text), **fields), tmp_path / "data", max_length=length)
    assert "\n" not in str(error.value)
    assert not isinstance(error.value, UsageError)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_a_fraction_that_empties_a_split_is_bad_usage(fraction):
    with pytest.raises(UsageError, match=r"data\.validation_fraction=.* choose a number between"):
        DataConfig(validation_fraction=fraction).check()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokenizer": "bpe", "vocab_size": 256}, "data.vocab_size=256 .* choose 257 or more"),
        ({"source": "wiki"}, "unknown data.source 'wiki': choose one of files, stdlib"),
    ],
)
def test_fields_that_do_not_fit_are_bad_usage(tmp_path, fields, message):
    with pytest.raises(UsageError, match=message):
        prepare(DataConfig(**fields), tmp_path)
    DataConfig(vocab_size=5).check()  # bytes do not read it


def test_a_full_disk_gets_one_clear_line_and_leaves_nothing(tmp_path, book, monkeypatch):
    config = DataConfig(**book(PROSE * 100))

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(InputError, match=r"cannot write .*data: No space left on device"):
            prepare(config, tmp_path / "data")
    assert [path.name for path in (tmp_path / "data").iterdir()] == [".lock"]
    assert prepare(config, tmp_path / "data").tokens.size > 0


def test_a_directory_that_cannot_be_made_gets_one_clear_line(tmp_path, book):
    config = DataConfig(**book(PROSE * 100))
    for source in (config, DataConfig()):
        with pytest.raises(InputError, match=r"cannot write .*book\.txt/data: Not a directory"):
            prepare(source, tmp_path / "book.txt" / "data")


def test_a_corpus_that_changes_while_it_is_read_is_refused(tmp_path, book, monkeypatch):
    config = DataConfig(**book(PROSE * 100))
    original = module._write_tokens

    def write_and_edit(*arguments):
        counts = original(*arguments)
        book(PROSE * 101)
        return counts

    with monkeypatch.context() as patch:
        patch.setattr(module, "_write_tokens", write_and_edit)
        with pytest.raises(InputError, match="changed while they were read: run again"):
            prepare(config, tmp_path / "data")
    assert prepare(config, tmp_path / "data").tokens.tobytes() == (PROSE * 101).encode()
