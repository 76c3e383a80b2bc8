import ast
import sys
from pathlib import Path

import jax_extractor.data

ALLOWED = {
    "numpy",
    "tokenizers",
    "jax_extractor.data",
    "jax_extractor.errors",
    "jax_extractor.files",
}


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def test_the_floor_imports_numpy_and_tokenizers_but_never_jax():
    names = set()
    for path in Path(jax_extractor.data.__file__).parent.glob("*.py"):
        names |= set(imported(ast.parse(path.read_text())))
    foreign = {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}
    roots = {".".join(name.split(".")[: 2 if name.startswith("jax_ex") else 1]) for name in foreign}
    assert roots == ALLOWED
