"""A run directory opened again: the model of a checkpoint, or one line on what is wrong."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_extractor.errors import InputError, UsageError
from jax_extractor.training import open_run, train

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture
def copy(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "copy")


def test_the_latest_checkpoint_is_what_was_trained(trained, tiny, copy):
    run = open_run(trained)
    assert (run.directory, run.config, run.step) == (trained, tiny, 12)
    state = train(tiny, copy)  # finished: gives back its final state
    jax.tree.map(np.testing.assert_array_equal, run.params, state.params)
    tokens = run.tokenizer.encode("The quick brown fox")[None, :8]
    logits = run.model.apply({"params": run.params}, jnp.asarray(tokens))
    assert logits.shape == (1, 8, 256)


def test_an_earlier_checkpoint(trained):
    early, late = open_run(trained, 8), open_run(trained)
    assert early.step == 8
    differing = jax.tree.map(lambda a, b: np.abs(a - b).max(), early.params, late.params)
    assert max(jax.tree.leaves(differing)) > 1e-4


def test_no_run(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(InputError, match=r"is not a run directory .*train one with"):
            open_run(folder)


def test_a_run_without_checkpoint(copy):
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(InputError, match="has no checkpoint: train it first"):
        open_run(copy)


def test_a_step_that_was_not_saved(trained):
    with pytest.raises(InputError, match="has no checkpoint of step 9: choose one of 8, 12"):
        open_run(trained, 9)


@pytest.mark.parametrize(
    "text, told",
    [
        ("{", "cannot be read"),
        ("[1]", "no JSON object"),
        ('{"train": {"stpes": 1}}', "the field 'stpes', unknown to this version"),
        ('{"train": [1]}', "where TrainConfig should be"),
        ('{"train": {"stpes": 1}}', "config.json: .*: restore it or train anew"),
        ('{"model": {"features": -1}}', "config.json: .*features=-1.*: restore it"),
    ],
)
def test_a_damaged_configuration(text, told, copy):
    (copy / "config.json").write_text(text)
    with pytest.raises(InputError, match=told) as caught:
        open_run(copy)
    assert not isinstance(caught.value, UsageError)


def test_a_damaged_checkpoint(copy, array_files):
    for path in array_files(copy / "checkpoints" / "12"):
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    with pytest.raises(InputError, match=r"checkpoints/12 is damaged: .* to go on from step 8"):
        open_run(copy)
    assert open_run(copy, 8).step == 8


def test_a_missing_tokenizer_is_written_anew(copy, tiny):
    (copy / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"no tokenizer at .*: run the same train command again"):
        open_run(copy)
    train(tiny, copy)
    assert open_run(copy).tokenizer.vocab_size == 256


def test_checkpoints_without_a_configuration_are_not_continued(copy, tiny):
    (copy / "config.json").unlink()
    with pytest.raises(InputError, match=r"has checkpoints but no config\.json: restore it, or"):
        train(tiny, copy)


def test_a_configuration_of_other_sizes(copy):
    values = json.loads((copy / "config.json").read_text())
    values["model"]["features"] = 32
    (copy / "config.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match=r"is float32\(.*16.* and float32\(.*32"):
        open_run(copy)
