"""Where text comes from: a corpus is a row of UTF-8 files, read as a stream."""

import codecs
import glob
import hashlib
import platform
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jax_extractor.data.stdlib_prose import stdlib_prose, stdlib_root
from jax_extractor.errors import InputError, UsageError, unknown_name
from jax_extractor.files import reading_errors, write_atomic, writing_errors

BLOCK = 1 << 16  # bytes read, and about the characters of one piece of text
STDLIB_VERSION = 1  # raise it when stdlib_prose would give another text


@dataclass(frozen=True)
class Corpus:
    """UTF-8 files, one after the other; bytes are counted from the start of the first."""

    paths: tuple[Path, ...]

    def identity(self) -> list[list[str | int]]:
        """[path, size, modification time in ns] of each file: equal as long as none is edited."""
        found: list[list[str | int]] = []
        for path in self.paths:
            with reading_errors(path):
                status = path.stat()
            found.append([str(path), status.st_size, status.st_mtime_ns])
        return found

    def digest(self) -> str:
        """SHA-256 of all bytes, in hexadecimal; InputError at the first that is not UTF-8."""
        sha = hashlib.sha256()
        for path in self.paths:
            for text in _read_text(path, 0, path.stat().st_size):
                sha.update(text.encode())
        return sha.hexdigest()

    def size(self) -> int:
        """Bytes in all files together."""
        return sum(path.stat().st_size for path in self.paths)

    def character_start(self, position: int) -> int:
        """The start of the character that holds byte `position`; `position` itself at the end."""
        for path, offset, size in self._spans():
            if offset <= position < offset + size:
                with open(path, "rb") as file:
                    start = max(0, position - offset - 3)  # a character has at most four bytes
                    file.seek(start)
                    before = file.read(position - offset - start + 1)
                while before and before[-1] & 0xC0 == 0x80:  # 10xxxxxx continues a character
                    before = before[:-1]
                    position -= 1
                return position
        return position

    def text(self, start: int = 0, stop: int | None = None) -> Iterator[str]:
        """The text of bytes `start` to `stop` in pieces of about 64 KiB that end with a line.

        The pieces are a function of the range and the files alone. A line that is longer than a
        piece is cut between two characters.
        """
        for path, offset, size in self._spans():
            end = size if stop is None else min(size, stop - offset)
            if end > max(0, start - offset):
                yield from _whole_lines(_read_text(path, max(0, start - offset), end))

    def _spans(self) -> Iterator[tuple[Path, int, int]]:
        offset = 0
        for path in self.paths:
            size = path.stat().st_size
            yield path, offset, size
            offset += size


def _read_text(path: Path, start: int, stop: int) -> Iterator[str]:
    pending = b""
    with reading_errors(path), open(path, "rb") as file:
        file.seek(start)
        while start < stop:
            block = file.read(min(BLOCK, stop - start))
            if not block:
                raise InputError(f"data.files: {path} became shorter while it was read")
            start += len(block)
            pending += block
            try:
                text, used = codecs.utf_8_decode(pending, "strict", start >= stop)
            except UnicodeDecodeError as error:
                offset = start - len(pending) + error.start
                raise InputError(
                    f"data.files: {path} is not UTF-8: byte {pending[error.start]:#04x} at offset "
                    f"{offset}: convert it, such as by iconv -t UTF-8"
                ) from None
            pending = pending[used:]
            yield text


def _whole_lines(pieces: Iterator[str]) -> Iterator[str]:
    """Move the unfinished last line of a piece to the next: tokens do not reach across pieces."""
    begun = ""
    for piece in pieces:
        piece = begun + piece
        end = piece.rfind("\n") + 1 or len(piece)
        begun = piece[end:]
        yield piece[:end]
    if begun:
        yield begun


def open_corpus(source: str, files: tuple[str, ...], directory: Path) -> Corpus:
    """The corpus called `source`; what has to be made for it is kept in `directory`.

    Raises UsageError for an unknown source and for `files` that do not go with it, InputError for
    files that cannot be used.
    """
    if source not in SOURCES:
        raise unknown_name("data.source", source, SOURCES)
    return SOURCES[source](files, directory)


def _stdlib_corpus(files: tuple[str, ...], directory: Path) -> Corpus:
    if files:
        raise UsageError(
            f"data.files={files} is not read by data.source='stdlib': add --data.source files"
        )
    path = directory / f"stdlib-{platform.python_version()}-{STDLIB_VERSION}.txt"
    if not path.is_file():
        documents = stdlib_prose(stdlib_root())
        with writing_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
        write_atomic(
            path, ((document + "\n\n").encode("utf-8", "replace") for document in documents)
        )
    return Corpus((path,))


def _files_corpus(files: tuple[str, ...], directory: Path) -> Corpus:
    if not files:
        raise UsageError("data.source='files' needs data.files: add --data.files PATH...")
    found = {path.resolve() for name in files for path in _matches(name)}
    for path in found:
        _check_file(path)
    return Corpus(tuple(sorted(found)))


def _matches(name: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.exists() or not glob.has_magic(name):
        return [path]
    matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
    matches = [match for match in matches if not match.is_dir()]
    if not matches:
        raise InputError(f"data.files: no file matches {name}: check the pattern and the folder")
    return matches


def _check_file(path: Path) -> None:
    with reading_errors(path):
        status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise InputError(
            f"data.files: {path} is a directory: name its files, such as {path}/**/*.txt"
        )
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"data.files: {path} is not a regular file: save the text to a file first")
    if status.st_size == 0:
        raise InputError(f"data.files: {path} is empty: leave it out")


# A new source, such as tfds:NAME, is one function from (files, directory) to a Corpus.
SOURCES: dict[str, Callable[[tuple[str, ...], Path], Corpus]] = {
    "files": _files_corpus,
    "stdlib": _stdlib_corpus,
}
