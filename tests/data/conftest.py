import pytest

from jax_extractor.data import DataConfig, prepare


@pytest.fixture(scope="session")
def stdlib_directory(tmp_path_factory):
    return tmp_path_factory.mktemp("stdlib")


@pytest.fixture(scope="session")
def stdlib_bytes(stdlib_directory):
    return prepare(DataConfig(), stdlib_directory)


@pytest.fixture(scope="session")
def stdlib_bpe(stdlib_directory, stdlib_bytes):
    return prepare(DataConfig(tokenizer="bpe", vocab_size=1024), stdlib_directory)


@pytest.fixture
def book(tmp_path):
    """A function that writes a text file and gives its configuration fields."""

    def write(text: str | bytes, name: str = "book.txt") -> dict:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return {"source": "files", "files": (str(path),)}

    return write
