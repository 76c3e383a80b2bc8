"""An exported model runs where this package is absent and gives what `generate` gives."""

import json
import re
import subprocess
import sys
import zipfile

import pytest

from jax_extractor.cli import main
from jax_extractor.errors import InputError, UsageError
from jax_extractor.generation import GenerationConfig, SamplingConfig, generate
from jax_extractor.generation.export import (
    PLATFORMS,
    ExportConfig,
    export_functions,
    export_model,
    width_of_prompts,
)
from jax_extractor.training import open_run

#: A None in sys.modules makes every import of that name fail.
BLOCK = """
import sys
for name in ("jax_extractor", "flax", "optax", "orbax", "jaxtyping", "chex"):
    sys.modules[name] = None
try:
    import jax_extractor
except ImportError:
    pass
else:
    raise SystemExit("jax_extractor can be imported")
"""


def run_alone(file, prompt, calls):
    """The texts that the program of the file's README makes in a process without the package."""
    with zipfile.ZipFile(file) as archive:
        (program,) = re.findall(r"```python\n(.*?)```", archive.read("README.md").decode(), re.S)
    command = [sys.executable, "-I", "-W", "error", "-c", BLOCK + program, file, prompt, str(calls)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=file.parent,
        env={"JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("samples", "flags", "sampling"),
    [
        (1, ["--temperature", "0"], SamplingConfig(temperature=0.0)),
        (
            2,
            ["--top-k", "50", "--top-p", "0.9", "--repetition-penalty", "1.2"],
            SamplingConfig(top_k=50, top_p=0.9, repetition_penalty=1.2),
        ),
    ],
    ids=["greedy", "sampled"],
)
def test_a_process_without_the_package_writes_the_same_text(
    tiny_run, tmp_path, capsys, samples, flags, sampling
):
    """Past the context of 16 tokens, through the command line and the README's own program."""
    file = tmp_path / "model.zip"
    fixed = ["--batch-size", samples, "--prompt-width", 8, "--tokens-per-call", 12]
    command = ["export", tiny_run, "--out", file, *fixed, *flags]
    assert main([str(word) for word in command]) == 0
    assert capsys.readouterr().out.startswith(f"{file}: ")
    texts = run_alone(file, "Thé ", 2)
    config = GenerationConfig(max_tokens=24, samples=samples, sampling=sampling)
    expected = generate(open_run(tiny_run), ["Thé "], config)
    assert [text["tokens"] for text in texts] == [list(each.tokens) for each in expected]


def test_attention_is_exported_for_every_platform(attention_writer):
    config = ExportConfig(batch_size=2, prompt_width=4, tokens_per_call=3)
    functions = export_functions(attention_writer.model, attention_writer.params, config)
    assert list(functions) == ["prepare", "start", "advance"]
    for function in functions.values():
        assert function.platforms == PLATFORMS
    tokens, log_probabilities = functions["advance"].out_avals[-2:]
    assert (tokens.shape, tokens.dtype.name) == ((3, 2), "int32")
    assert (log_probabilities.shape, log_probabilities.dtype.name) == ((3, 2), "float32")


def test_the_same_model_gives_the_same_parameters_and_settings(attention_writer, tmp_path):
    config = ExportConfig(prompt_width=2, tokens_per_call=1)
    export_model(attention_writer, tmp_path / "a", config)
    with zipfile.ZipFile(tmp_path / "a") as archive:
        settings = json.loads(archive.read("settings.json"))
        token_bytes = json.loads(archive.read("tokens.json"))
        assert archive.testzip() is None
    assert (settings["prompt_width"], settings["sampling"]["temperature"]) == (2, 1.0)
    assert token_bytes == [f"{value:02x}" for value in range(256)]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_more_prompt_than_positions_is_refused(attention_writer, tmp_path):
    with pytest.raises(UsageError, match="prompt_width=5: the model has 4 positions"):
        export_model(attention_writer, tmp_path / "a", ExportConfig(prompt_width=5))
    assert width_of_prompts(attention_writer.model, ExportConfig()) == 4
    assert list(tmp_path.iterdir()) == []


def test_places_that_no_file_can_have_are_refused(attention_writer, tmp_path):
    with pytest.raises(InputError, match="is a folder: name a file"):
        export_model(attention_writer, tmp_path)
    with pytest.raises(InputError, match="lies in no folder"):
        export_model(attention_writer, tmp_path / "no" / "a")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--out"),
        (["--out", "a", "--batch-size", "0"], "batch_size=0: choose at least 1"),
        (["--out", "a", "--prompt-width", "-2"], "prompt_width=-2: choose at least 1"),
        (["--out", "a", "--tokens-per-call", "0"], "tokens_per_call=0: choose at least 1"),
        (["--out", "a", "--top-p", "0"], "top_p=0.0: choose"),
    ],
)
def test_bad_usage_is_one_line_before_the_run_is_opened(capsys, flags, message):
    assert main(["export", "no/such/run", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


def test_a_missing_run_is_one_line(capsys, tmp_path):
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "a")]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "is not a run directory" in err
