import io
import json
import subprocess
import sys

import pytest

from jax_extractor.cli import main
from jax_extractor.generation import GenerationConfig, SamplingConfig, generate
from jax_extractor.training import open_run


def run(capsys, *arguments):
    status = main(["generate", *map(str, arguments)])
    return status, *capsys.readouterr()


def completions(directory, prompts, **fields):
    return generate(open_run(directory), prompts, GenerationConfig(**fields))


def test_the_text_of_the_api_follows_the_prompt(tiny_run, capsys):
    flags = "--max-tokens 20 --temperature 0.7 --top-k 50 --top-p 0.9 --min-p 0.01"
    flags += " --repetition-penalty 1.1 --seed 3"
    sampling = SamplingConfig(
        temperature=0.7, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1
    )
    (expected,) = completions(tiny_run, ["Thé "], max_tokens=20, seed=3, sampling=sampling)
    found = run(capsys, tiny_run, "--prompt", "Thé ", *flags.split())
    assert found == (0, f"Thé {expected.text}\n", "")


def test_several_texts_are_counted(tiny_run, capsys):
    first, second = completions(tiny_run, [""], samples=2, max_tokens=5)
    assert run(capsys, tiny_run, "--samples", 2, "--max-tokens", 5) == (
        0,
        f"--- 1 of 2 ---\n{first.text}\n--- 2 of 2 ---\n{second.text}\n",
        "",
    )


@pytest.mark.parametrize("batch_size", [1, 16])
def test_json_lines_of_prompts_from_standard_input(tiny_run, capsys, monkeypatch, batch_size):
    prompts = ["The ", "", "longer than the context of sixteen tokens"]
    data = io.TextIOWrapper(io.BytesIO("\r\n".join([*prompts, ""]).encode()))
    monkeypatch.setattr(sys, "stdin", data)
    flags = ["--prompts-file", "-", "--json", "--samples", 2, "--max-tokens", 18, "--stop", "e"]
    status, out, err = run(capsys, tiny_run, *flags, "--stop", "a", "--batch-size", batch_size)
    assert (status, err) == (0, "")
    rows = [json.loads(line) for line in out.splitlines()]
    expected = completions(tiny_run, prompts, samples=2, max_tokens=18, stop=("e", "a"))
    assert [row["prompt"] for row in rows] == [p for p in prompts for _ in range(2)]
    for row, completion in zip(rows, expected, strict=True):
        assert row["sample"] == completion.sample
        assert row["text"] == completion.text
        assert tuple(row["tokens"]) == completion.tokens
        assert row["log_probabilities"] == pytest.approx(completion.log_probabilities, rel=1e-4)
        assert row["stopped"] == completion.stopped


def test_prompts_from_a_file(tiny_run, capsys, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("né\nb")
    status, out, _ = run(capsys, tiny_run, "--prompts-file", file, "--json", "--max-tokens", 1)
    assert status == 0
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["né", "b"]


def test_the_text_appears_before_it_is_finished(tiny_run, monkeypatch):
    shown = []

    class Terminal(io.StringIO):
        def flush(self):
            shown.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Terminal())
    assert main(["generate", str(tiny_run), "--prompt", "The", "--max-tokens", "40"]) == 0
    lengths = [len(text) for text in dict.fromkeys(shown)]
    assert len(lengths) == 3 and lengths == sorted(lengths)
    assert all(text.startswith("The") for text in shown)


@pytest.mark.slow
def test_a_process_writes_utf8_and_refuses_bytes_that_are_not(tiny_run):
    def start(prompt: bytes):
        command = [sys.executable, "-m", "jax_extractor", "generate", str(tiny_run)]
        return subprocess.run(
            [*command, "--max-tokens", "8", b"--prompt", prompt],
            capture_output=True,
            env={"PYTHONIOENCODING": "ascii", "JAX_PLATFORMS": "cpu", "PYTHONUTF8": "1"},
            check=False,
        )

    done = start("né".encode())
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode("utf-8").startswith("né")
    done = start(b"ab\xff")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == (
        b"jax-extractor: --prompt is not UTF-8 (byte 0xff at position 2): pass text in UTF-8\n"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "-1"], "temperature=-1.0: choose 0 (greedy) or more"),
        (["--top-p", "0"], "top_p=0.0: choose"),
        (["--top-k", "-3"], "top_k=-3: choose"),
        (["--min-p", "2"], "min_p=2.0: choose"),
        (["--repetition-penalty", "0"], "repetition_penalty=0.0: choose"),
        (["--max-tokens", "0"], "max_tokens=0: choose at least 1"),
        (["--samples", "0"], "samples=0: choose at least 1"),
        (["--seed", "-1"], "seed=-1: choose from 0 to"),
        (["--stop", ""], "--stop '' is empty: give the text to stop before"),
        (["--max-tokens", "many"], "--max-tokens"),
        (["--unknown", "1"], "--unknown"),
        (["--prompt", "a", "--prompts-file", "b"], "exclude each other"),
        (["--stop", "\udcff"], "--stop is not UTF-8 (byte 0xff at position 0)"),
    ],
)
def test_bad_usage_is_one_line_before_the_run_is_opened(capsys, flags, message):
    status, out, err = run(capsys, "no/such/run", *flags)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1 and message in err


def test_a_missing_run_or_checkpoint_is_one_line(tiny_run, capsys, tmp_path):
    status, out, err = run(capsys, tmp_path)
    assert (status, out) == (1, "") and "is not a run directory" in err
    status, out, err = run(capsys, tiny_run, "--step", 2)
    assert (status, out, err.count("\n")) == (1, "", 1)


def test_bad_prompt_files_are_named(capsys, tmp_path):
    file = tmp_path / "prompts.txt"
    for data, message in (
        (None, "cannot be read (No such file or directory): name a text file"),
        (b"", "is empty: give one prompt a line"),
        (b"\xef\xbb\xbf", "is empty: give one prompt a line"),
        (b"fine\nb\xe9d\n", "is not UTF-8 (byte 0xe9 in line 2)"),
    ):
        if data is not None:
            file.write_bytes(data)
        status, out, err = run(capsys, tmp_path, "--prompts-file", file)
        assert (status, out) == (1, "")
        assert err.count("\n") == 1 and f"--prompts-file {file} {message}" in err
