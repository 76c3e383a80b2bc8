"""A model with its sampling as one file that runs without this package: `jax.export` in a zip.

    README.md         how to run it, with a program that needs jax, flatbuffers and numpy alone
    settings.json     batch_size, prompt_width, tokens_per_call, vocab_size and the sampling
    tokenizer.json    how text becomes token ids
    tokens.json       the bytes of each token, in hexadecimal
    parameters.npz    the parameters, in the order that `prepare` takes them
    prepare.bin       prepare(parameters) -> weights: the transforms, so that the file holds none
    start.bin         start(weights, tokens, valid, seed, samples) -> carry: reads the prompts
    advance.bin       advance(weights, carry) -> carry, tokens, log-probabilities

parameters, weights and carry are flat tuples of arrays; all shapes and the sampling are fixed.
"""

import dataclasses
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jax_extractor.errors import InputError, UsageError
from jax_extractor.generation.decoding import make_decoder
from jax_extractor.generation.generate import CHUNK, Writer, advance, start
from jax_extractor.generation.sampling import SamplingConfig, sample_keys
from jax_extractor.models import LanguageModel
from jax_extractor.shapes import PyTree

PLATFORMS = ("cpu", "cuda", "tpu")
#: The tokens of a prompt where nothing is said.
PROMPT_WIDTH = 64


@dataclass(frozen=True)
class ExportConfig:
    """What is fixed in an exported model."""

    batch_size: int = 1
    """B, the texts made at a time."""
    prompt_width: int | None = None
    """P, the tokens of a prompt: shorter ones are padded on the left, of longer ones the last P;
    if none is given, 64, or as many as the model has positions where these are fewer."""
    tokens_per_call: int = CHUNK
    """N, the tokens of each text that one call makes."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How tokens are drawn."""

    def check(self) -> None:
        """Raises UsageError naming the first field that does not fit."""
        for name in ("batch_size", "prompt_width", "tokens_per_call"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name}={value}: choose at least 1")
        self.sampling.check()


def width_of_prompts(model: LanguageModel, config: ExportConfig) -> int:
    """P; UsageError where it is more than the model has positions."""
    wanted = config.prompt_width or PROMPT_WIDTH
    most = make_decoder(model).prompt_width(wanted)
    if config.prompt_width is not None and most < wanted:
        raise UsageError(
            f"prompt_width={wanted}: the model has {most} positions; choose at most {most}"
        )
    return min(most, wanted)


def export_functions(
    model: LanguageModel, params: PyTree, config: ExportConfig
) -> dict[str, export.Exported]:
    """`prepare`, `start` and `advance` for cpu, cuda and tpu, on flat tuples of arrays.

    Shapes: tokens (B, P) int32; valid (B, P) bool, False for the padding on the left, at least one
    True in a row; seed () int32; samples (B,) int32; out of `advance` tokens (N, B) int32 and
    log-probabilities (N, B) float32. The same seed and samples give what `generate` gives.

    Raises:
        UsageError: a field that does not fit, or more positions than the model has.
    """
    config.check()
    decoder = make_decoder(model)
    params_tree = jax.tree.structure(params)
    weights_tree = jax.tree.structure(jax.eval_shape(decoder.prepare, params))

    def flat_prepare(parameters: tuple) -> tuple:
        params = jax.tree.unflatten(params_tree, parameters)
        return tuple(jax.tree.leaves(decoder.prepare(params)))

    def begin(weights: tuple, tokens, valid, seed, samples):
        carry = start(decoder, jax.tree.unflatten(weights_tree, weights), tokens, valid)
        return carry, jax.random.key_data(sample_keys(seed, samples))

    def flat_start(*arguments) -> tuple:
        return tuple(jax.tree.leaves(begin(*arguments)))

    parameters = shapes(tuple(jax.tree.leaves(params)))
    weights = jax.eval_shape(flat_prepare, parameters)
    wide = (config.batch_size, width_of_prompts(model, config))
    prompts = (
        jax.ShapeDtypeStruct(wide, jnp.int32),
        jax.ShapeDtypeStruct(wide, jnp.bool_),
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct(wide[:1], jnp.int32),
    )
    carry_tree = jax.tree.structure(jax.eval_shape(begin, weights, *prompts))

    def flat_advance(weights: tuple, carry: tuple) -> tuple:
        whole = jax.tree.unflatten(weights_tree, weights)
        carry, key_data = jax.tree.unflatten(carry_tree, carry)
        keys = jax.random.wrap_key_data(key_data)
        length = config.tokens_per_call
        carry, *drawn = advance(decoder, config.sampling, length, whole, keys, carry)
        return tuple(jax.tree.leaves((carry, key_data))), *drawn

    def exported(function: Callable, *arguments) -> export.Exported:
        return export.export(jax.jit(function), platforms=PLATFORMS)(*arguments)

    carry = jax.eval_shape(flat_start, weights, *prompts)
    return {
        "prepare": exported(flat_prepare, parameters),
        "start": exported(flat_start, weights, *prompts),
        "advance": exported(flat_advance, weights, carry),
    }


def shapes(tree: PyTree) -> PyTree:
    """Shapes and dtypes alone: nothing of where the arrays lie goes into an export."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def export_model(run: Writer, out: Path, config: ExportConfig = ExportConfig()) -> None:
    """Writes the file that the head of this module describes, whole or not at all.

    Raises:
        UsageError: what `export_functions` raises.
        InputError: a file that cannot be written.
    """
    config.check()
    if out.is_dir() or not out.parent.is_dir():
        wrong = "is a folder" if out.is_dir() else f"lies in no folder ({out.parent} is none)"
        raise InputError(f"--out {out} {wrong}: name a file in a folder that exists")
    functions = export_functions(run.model, run.params, config)
    settings = dataclasses.asdict(config) | {
        "prompt_width": width_of_prompts(run.model, config),
        "vocab_size": run.tokenizer.vocab_size,
    }
    members: dict[str, bytes | str] = {
        "README.md": README,
        "settings.json": json.dumps(settings, indent=2) + "\n",
        "tokenizer.json": run.tokenizer.to_json(),
        "tokens.json": json.dumps([token.hex() for token in run.tokenizer.token_bytes]),
        "parameters.npz": npz(run.params),
    }
    members |= {f"{name}.bin": bytes(f.serialize()) for name, f in functions.items()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            # A fixed time stamp: the same model gives the same bytes.
            archive.writestr(zipfile.ZipInfo(name), data, compression(name))
    write(out, buffer.getbuffer())


def npz(params: PyTree) -> bytes:
    """The leaves as an .npz whose arrays have the names of their paths, in order."""
    buffer = io.BytesIO()
    leaves = jax.tree_util.tree_leaves_with_path(params)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    arrays = [np.asarray(leaf) for _, leaf in leaves]
    np.savez(buffer, **dict(zip(names, arrays, strict=True)))  # type: ignore[arg-type]
    return buffer.getvalue()


def compression(name: str) -> int:
    """Trained parameters do not compress."""
    return zipfile.ZIP_STORED if name == "parameters.npz" else zipfile.ZIP_DEFLATED


def write(out: Path, data: memoryview) -> None:
    """Writes beside `out` and moves the file there; InputError where the disk says no."""
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=out.parent, delete=False) as file:
            temporary = file.name
            file.write(data)
        os.chmod(temporary, 0o644)  # a temporary file's mode is for its owner alone
        os.replace(temporary, out)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise InputError(
            f"--out {out} cannot be written ({error.strerror}): free some space or choose "
            "another file"
        ) from error


README = """# A language model with its sampling, exported

This zip file runs on cpu, cuda and tpu with `pip install jax flatbuffers numpy`, nothing else.

    prepare(parameters) -> weights
    start(weights, tokens, valid, seed, samples) -> carry
    advance(weights, carry) -> carry, tokens, log_probabilities

`parameters`, `weights` and `carry` are flat tuples of arrays. `settings.json` tells B =
batch_size, P = prompt_width, N = tokens_per_call, and how tokens are drawn; all of it is fixed.

- tokens (B, P) int32, padded on the left; valid (B, P) bool, False for the padding; every row has
  at least one valid token. seed () int32, and samples (B,) int32 numbers the texts of a prompt: a
  text depends on seed, prompt and number alone.
- Each call of `advance` draws the next N tokens of each row: tokens (N, B) int32, and their
  log-probabilities (N, B) in nats under the unmodified model. It may be called without end.
- `tokens.json` holds the bytes of each token. To encode text, see `tokenizer.json`: kind "bytes"
  has a token for each byte of UTF-8; kind "bpe" holds in "state" what
  `tokenizers.Tokenizer.from_str` reads.

```python
import io
import json
import sys
import zipfile

import jax
import numpy as np
from jax import export

path, prompt, calls = sys.argv[1], sys.argv[2], int(sys.argv[3])
with zipfile.ZipFile(path) as file:
    settings, token_bytes, tokenizer = (
        json.loads(file.read(f"{name}.json")) for name in ("settings", "tokens", "tokenizer")
    )
    prepare, start, advance = (
        jax.jit(export.deserialize(bytearray(file.read(f"{name}.bin"))).call)
        for name in ("prepare", "start", "advance")
    )
    stored = np.load(io.BytesIO(file.read("parameters.npz")))
    parameters = tuple(stored[name] for name in stored.files)

if tokenizer["kind"] == "bytes":
    ids = list((prompt or "\\n").encode())
else:
    import tokenizers

    ids = tokenizers.Tokenizer.from_str(tokenizer["state"]).encode(prompt or "\\n").ids
rows, width = settings["batch_size"], settings["prompt_width"]
ids = ids[-width:]
tokens = np.zeros((rows, width), np.int32)
tokens[:, width - len(ids) :] = ids
valid = np.zeros((rows, width), bool)
valid[:, width - len(ids) :] = True

weights = prepare(parameters)
seed, samples = np.int32(0), np.arange(rows, dtype=np.int32)
carry = start(weights, tokens, valid, seed, samples)
texts = [[] for _ in range(rows)]
for _ in range(calls):
    carry, drawn, _ = advance(weights, carry)
    for row, text in enumerate(texts):
        text += np.asarray(drawn)[:, row].tolist()
for text in texts:
    data = b"".join(bytes.fromhex(token_bytes[token]) for token in text)
    print(json.dumps({"text": data.decode("utf-8", "replace"), "tokens": text}))
```
"""
