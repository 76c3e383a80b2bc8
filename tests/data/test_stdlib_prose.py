import pytest

from jax_extractor.data import stdlib_prose as module
from jax_extractor.data.stdlib_prose import stdlib_prose, stdlib_root
from jax_extractor.errors import InputError

LONG = "A paragraph that is long enough to count as prose, whatever it may have to say about {}."


def write(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_docstrings_come_in_order_of_path_and_line_and_nothing_runs(tmp_path):
    docs = [LONG.format(number) for number in range(6)]
    write(tmp_path, "b.py", f'"""{docs[3]}"""\nraise SystemExit\n')
    write(
        tmp_path,
        "a/x.py",
        f'class A:\n    """{docs[0]}"""\n    def f(self):\n        """{docs[1]}"""\n'
        f'if True:\n    async def g():\n        """{docs[2]}"""\n',
    )
    write(tmp_path, "pydoc_data/topics.py", repr_topics({"while": docs[5], "for": docs[4]}))
    assert list(stdlib_prose(tmp_path)) == docs


def repr_topics(topics):
    return f"# generated\ntopics = {topics!r}\n"


def test_tests_installed_packages_and_files_that_do_not_parse_are_skipped(tmp_path):
    for name in ["test/a.py", "x/tests/a.py", "site-packages/a.py", "idle_test/a.py", "a.txt"]:
        write(tmp_path, name, f'"""{LONG.format(name)}"""')
    write(tmp_path, "bad.py", f'"""{LONG.format("bad")}"""\nprint "two"\n')
    write(tmp_path, "old_escape.py", f'"""{LONG.format("an old escape")}"""\nx = "\\d"\n')
    assert list(stdlib_prose(tmp_path)) == [LONG.format("an old escape")]


def test_doctests_captions_and_repeated_paragraphs_are_left_out(tmp_path):
    first, second = LONG.format("doctests"), LONG.format("what follows them")
    write(
        tmp_path,
        "a.py",
        f'"""{first}\n\nFor example:\n\n>>> 1 + 1\n2\n\n{second}\n"""\n'
        f'def f():\n    """Return the caption."""\n'
        f'def g():\n    """{first}\n\n    {second.replace(" ", "  ")}\n    """\n',
    )
    assert list(stdlib_prose(tmp_path)) == [f"{first}\n\n{second}"]


def test_a_python_without_sources_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(module.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(InputError, match=r"--data\.source files"):
        stdlib_root()


@pytest.mark.slow
def test_the_running_python_gives_the_same_megabytes_each_time(stdlib_bytes, stdlib_directory):
    (path,) = stdlib_directory.glob("stdlib-*.txt")
    text = path.read_text(encoding="utf-8")
    assert text == "".join(f"{document}\n\n" for document in stdlib_prose(stdlib_root()))
    assert len(text) > 1_000_000
    assert text.count(" the ") > 10_000
    paragraphs = [" ".join(p.split()) for p in text.split("\n\n") if len(p) >= 100]
    assert len(paragraphs) == len(set(paragraphs)) > 5_000
