"""English prose that every Python carries: the documentation of its standard library.

The text is read from source files with `ast`; no module is imported, so nothing is executed. On
one Python installation it is always the same text in the same order.
"""

import ast
import os
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from jax_extractor.errors import InputError

# Installed packages differ between machines; tests and generated tables hold almost no prose.
INSTALLED = frozenset(["dist-packages", "lib-dynload", "site-packages", "__pycache__"])
TABLES_AND_TESTS = frozenset(["encodings", "idle_test", "lib2to3", "test", "tests"])
TOPICS = "pydoc_data/topics.py"  # the language reference, as help("while") prints it
BLOCKS = ("body", "handlers", "cases", "orelse", "finalbody")  # where statements can stand
MIN_DOCSTRING = 80  # characters; shorter ones are captions, not prose
MIN_REPEATED = 40  # characters; a longer paragraph is kept the first time only


def stdlib_root() -> Path:
    """The folder of the running Python's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    if not (root / "os.py").is_file():
        raise InputError(
            f"data.source 'stdlib' finds no Python sources in {root}: "
            "use --data.source files --data.files PATH"
        )
    return root


def stdlib_prose(root: Path) -> Iterator[str]:
    """The documents below `root`, one docstring or topic each, in a fixed order.

    A paragraph that came before is left out, so that no paragraph of the validation part (the
    end of the corpus) has been seen in training.
    """
    seen: set[str] = set()
    for path in _source_files(root):
        for document in _documents(path, is_topics=path.relative_to(root).as_posix() == TOPICS):
            prose = _prose(document, seen)
            if len(prose) >= MIN_DOCSTRING:
                yield prose


def _source_files(root: Path) -> list[Path]:
    skipped = INSTALLED | TABLES_AND_TESTS
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _documents(path: Path, is_topics: bool) -> Iterator[str]:
    source = path.read_bytes()
    if b'"""' not in source and b"'''" not in source and not is_topics:
        return  # parsing is the slow part
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an old escape sequence in someone's docstring
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    if is_topics:
        for statement in tree.body:
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
                topics = ast.literal_eval(statement.value)
                yield from (topics[name] for name in sorted(topics))
    yield from _docstrings(tree)


def _docstrings(tree: ast.Module) -> Iterator[str]:
    """Docstrings in the order of the source, without a walk through expressions."""
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring:
                yield docstring
        blocks = [getattr(node, name, []) for name in BLOCKS]
        nodes += reversed([statement for block in blocks for statement in block])


def _prose(document: str, seen: set[str]) -> str:
    """`document` without doctests and without paragraphs in `seen`, which grows."""
    kept: list[str] = []
    for paragraph in document.expandtabs().split("\n\n"):
        paragraph = paragraph.rstrip().lstrip("\n")
        if paragraph.lstrip().startswith(">>>"):
            if kept and kept[-1].endswith(":"):  # it only led to the doctest
                kept.pop()
            continue
        if not paragraph:
            continue
        if len(paragraph) >= MIN_REPEATED:
            words = " ".join(paragraph.split())
            if words in seen:
                continue
            seen.add(words)
        kept.append(paragraph)
    return "\n\n".join(kept)
