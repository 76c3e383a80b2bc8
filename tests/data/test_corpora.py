import os
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_extractor.data import corpora
from jax_extractor.data.corpora import BLOCK, Corpus, open_corpus
from jax_extractor.errors import InputError, UsageError


def one_line(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_files_are_sorted_unique_and_may_be_globs(tmp_path):
    for name in ["b.txt", "a.txt", "deep/er/c.txt", "d.md", "[x].txt"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "folder.txt").mkdir()
    os.symlink(tmp_path / "a.txt", tmp_path / "again.txt")
    patterns = (f"{tmp_path}/**/*.txt", f"{tmp_path}/a.txt", f"{tmp_path}/[x].txt")
    corpus = open_corpus("files", patterns, tmp_path)
    names = [path.relative_to(tmp_path).as_posix() for path in corpus.paths]
    assert names == ["[x].txt", "a.txt", "b.txt", "deep/er/c.txt"]
    assert "".join(corpus.text()) == "".join(names)
    assert corpus.size() == len("".join(names))


def test_a_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("text")
    assert open_corpus("files", ("~/*.txt",), tmp_path).paths == ((tmp_path / "a.txt").resolve(),)


@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (lambda path: None, "a.txt", "cannot read .*a.txt .*No such file"),
        (lambda path: None, "*.text", r"no file matches .*\*\.text"),
        (lambda path: path.mkdir(), "a.txt", r"a.txt is a directory: .*a.txt/\*\*/\*.txt"),
        (lambda path: path.touch(), "a.txt", "a.txt is empty"),
        (lambda path: path.touch(), "a.*", "a.txt is empty"),
        (lambda path: os.mkfifo(path), "a.txt", "a.txt is not a regular file"),
        (lambda path: path.symlink_to(path.parent / "gone"), "*.txt", "cannot read .*gone"),
    ],
)
def test_a_file_that_cannot_be_used_gets_one_clear_line(tmp_path, make, name, message):
    make(tmp_path / "a.txt")
    with pytest.raises(InputError) as error:
        open_corpus("files", (f"{tmp_path}/{name}",), tmp_path)
    assert re.search(message, one_line(error))
    assert not isinstance(error.value, UsageError)


@pytest.mark.parametrize(
    ("source", "files", "message"),
    [
        ("wikipedia", (), "unknown data.source 'wikipedia': choose one of files, stdlib"),
        ("files", (), "--data.files PATH"),
        ("stdlib", ("a.txt",), "add --data.source files"),
    ],
)
def test_sources_that_do_not_fit_are_bad_usage(tmp_path, source, files, message):
    with pytest.raises(UsageError) as error:
        open_corpus(source, files, tmp_path)
    assert message in one_line(error)


@pytest.mark.parametrize("before", [0, 1, 10, BLOCK - 2, BLOCK - 1, BLOCK, 2 * BLOCK + 7])
@pytest.mark.parametrize("bad", [b"\xff", b"\xc3(", b"\xed\xa0\x80", b"\xe2\x82"])
def test_bytes_that_are_not_utf8_are_named_by_their_offset(tmp_path, before, bad):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"x" * before + bad)
    with pytest.raises(InputError) as error:
        Corpus((path,)).digest()
    line = one_line(error)
    assert f"{bad[0]:#04x} at offset {before}:" in line
    assert str(path) in line


def test_a_character_split_over_two_files_is_not_utf8(tmp_path):
    (tmp_path / "a").write_bytes(b"ab\xc3")
    (tmp_path / "b").write_bytes(b"\xa9")
    with pytest.raises(InputError, match="0xc3 at offset 2"):
        Corpus((tmp_path / "a", tmp_path / "b")).digest()


@settings(deadline=None, max_examples=60)
@given(
    texts=st.lists(st.text("aé\n€𝄞", min_size=1, max_size=30), min_size=1, max_size=4),
    cuts=st.tuples(st.integers(0, 150), st.integers(0, 150)),
    block=st.integers(1, 20),
)
def test_any_range_of_whole_characters_is_read_exactly(tmp_path_factory, texts, cuts, block):
    folder = tmp_path_factory.mktemp("texts")
    paths = [folder / str(number) for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text.encode())
    corpus = Corpus(tuple(paths))
    data = "".join(texts).encode()
    assert corpus.size() == len(data)
    start, stop = sorted(corpus.character_start(min(cut, len(data))) for cut in cuts)
    assert data[start:stop].decode().encode() == data[start:stop]  # strict: whole characters
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "BLOCK", block)
        pieces = list(corpus.text(start, stop))
        assert corpus.digest() == Corpus(tuple(paths)).digest()
    assert "".join(pieces).encode() == data[start:stop]


@pytest.mark.parametrize("character", ["a", "é", "€", "𝄞"])
def test_character_start_is_the_first_byte_of_the_character(tmp_path, character):
    path = tmp_path / "text"
    path.write_text(f"x{character}y", encoding="utf-8")
    size = len(character.encode())
    starts = [Corpus((path,)).character_start(position) for position in range(size + 3)]
    assert starts == [0, *[1] * size, 1 + size, 2 + size]


def test_pieces_end_with_lines_and_stay_small(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"line {n} " + "x" * (n % 90) + "\n" for n in range(20_000)))
    pieces = list(Corpus((path,)).text())
    assert len(pieces) > 10
    assert all(piece.endswith("\n") for piece in pieces)
    assert max(map(len, pieces)) < 2 * BLOCK


def test_one_endless_line_is_cut_too(tmp_path):
    path = tmp_path / "line.txt"
    path.write_text("é" * (3 * BLOCK))
    pieces = list(Corpus((path,)).text())
    assert max(map(len, pieces)) <= BLOCK
    assert "".join(pieces) == "é" * (3 * BLOCK)


def test_identity_changes_with_the_file_and_the_digest_with_its_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    corpus = Corpus((path,))
    identity, digest = corpus.identity(), corpus.digest()
    assert (corpus.identity(), corpus.digest()) == (identity, digest)
    os.utime(path, ns=(1, 1))
    assert corpus.identity() != identity
    assert corpus.digest() == digest
    path.write_text("two")
    assert corpus.digest() != digest


def test_a_file_that_vanishes_or_shrinks_gets_a_clear_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x" * (3 * BLOCK))
    pieces = Corpus((path,)).text()
    next(pieces)
    os.truncate(path, BLOCK)
    with pytest.raises(InputError, match="became shorter"):
        list(pieces)
    path.unlink()
    with pytest.raises(InputError, match=r"cannot read .*a\.txt"):
        Corpus((path,)).identity()
