"""The configuration: what it refuses, and its way through JSON and back."""

import dataclasses
import json

import pytest

from jax_extractor.data import DataConfig
from jax_extractor.errors import InputError, UsageError
from jax_extractor.models import ExtractorConfig, ModelConfig
from jax_extractor.training import Config, OptimizerConfig, TrainConfig
from jax_extractor.training.config import differences, from_dict, to_dict

UNUSUAL = Config(
    model=ModelConfig(
        mixer="he", num_layers=2, dropout=0.1, extractor=ExtractorConfig(kernel_scale=0.5)
    ),
    data=DataConfig(source="files", files=("a.txt", "b/*.txt"), tokenizer="bpe"),
    optimizer=OptimizerConfig(multipliers=(("kernel", 0.5), ("embed", 2.0)), schedule="constant"),
    train=TrainConfig(steps=7, parallel="pmap"),
)


def changed(path, value):
    """The default configuration with one field of another value, whatever its type."""
    config = Config()
    *parents, name = path.split(".")
    owner = config
    for parent in parents:
        owner = getattr(owner, parent)
    object.__setattr__(owner, name, value)  # a plain user has no type check at construction
    return config


def leaves(config, prefix=""):
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


@pytest.mark.parametrize("config", [Config(), UNUSUAL])
def test_round_trip_through_json(config):
    config.check()
    assert from_dict(Config, json.loads(json.dumps(to_dict(config)))) == config


def test_a_field_that_was_not_stored_has_its_default():
    assert from_dict(Config, {"train": {"steps": 3}}) == Config(train=TrainConfig(steps=3))


@pytest.mark.parametrize(
    "stored, told", [({"train": {"stpes": 3}}, "'stpes'"), ({"train": 3}, "3 where TrainConfig")]
)
def test_a_configuration_of_another_version(stored, told):
    with pytest.raises(InputError, match=told):
        from_dict(Config, stored)


def test_differences_name_every_field():
    assert differences(to_dict(UNUSUAL), to_dict(UNUSUAL)) == []
    assert differences(to_dict(Config()), to_dict(UNUSUAL)) == [
        "data.files: [] -> ['a.txt', 'b/*.txt']",
        "data.source: stdlib -> files",
        "data.tokenizer: bytes -> bpe",
        "model.dropout: 0.0 -> 0.1",
        "model.extractor.kernel_scale: None -> 0.5",
        "model.mixer: ishe -> he",
        "model.num_layers: 4 -> 2",
        "optimizer.multipliers: [] -> [['kernel', 0.5], ['embed', 2.0]]",
        "optimizer.schedule: cosine -> constant",
        "train.parallel: jit -> pmap",
        "train.steps: 1000 -> 7",
    ]


WRONG_VALUES = {
    "model.mixer": "attention",
    "model.arrangement": "ffn-ffn",
    "model.positions": "relative",
    "model.dtype": "float16",
    "model.ffn_activation": "swash",
    "model.extractor.adjust_activation": "swash",
    "model.features": 0,
    "model.num_layers": 0,
    "model.num_heads": -1,
    "model.max_length": 0,
    "model.ffn_features": 0,
    "model.dropout": 1.0,
    "data.source": "web",
    "data.tokenizer": "words",
    "data.validation_fraction": 1.0,
    "optimizer.learning_rate": -1e-3,
    "optimizer.schedule": "linear",
    "optimizer.warmup_steps": -1,
    "optimizer.final_fraction": 1.5,
    "optimizer.weight_decay": float("nan"),
    "optimizer.b1": 1.0,
    "optimizer.b2": -0.1,
    "optimizer.clip_norm": -1.0,
    "optimizer.multipliers": (("kernel(", 1.0),),
    "train.steps": 0,
    "train.batch_size": 0,
    "train.accumulate": 0,
    "train.seed": -1,
    "train.log_every": 0,
    "train.eval_every": -1,
    "train.eval_batches": 0,
    "train.checkpoint_every": 0,
    "train.keep_checkpoints": 0,
    "train.parallel": "threads",
    "train.model_devices": 0,
}


@pytest.mark.parametrize("path", WRONG_VALUES)
def test_a_wrong_value_is_named(path):
    with pytest.raises(UsageError) as caught:
        changed(path, WRONG_VALUES[path]).check()
    message = str(caught.value)
    assert path.rsplit(".", 1)[-1] in message
    value = WRONG_VALUES[path]
    assert (value[0][0] if isinstance(value, tuple) else str(value)) in message
    assert "choose" in message or "mend" in message


def test_more_wrong_values():
    for path, value, told in [
        ("train.seed", 2**31, "2147483648"),
        ("train.accumulate", 3, "train.batch_size=16 is not divisible"),
        ("optimizer.multipliers", (("kernel", -1.0),), "-1.0"),
        ("optimizer.learning_rate", float("inf"), "learning_rate=inf: choose a finite"),
        ("optimizer.weight_decay", float("inf"), "weight_decay=inf: choose a finite"),
        ("optimizer.multipliers", (("kernel", 1.0, 2.0),), "multipliers"),
    ]:
        with pytest.raises(UsageError, match=told):
            changed(path, value).check()
    with pytest.raises(UsageError, match="pmap shares batches only"):
        Config(train=TrainConfig(parallel="pmap", model_devices=2)).check()


def test_every_field_refuses_another_type():
    """An experiment is a Python file that nobody need have type-checked."""
    count = 0
    for path, _ in leaves(Config()):
        wrong = ["a", "list"]  # no field is a list: tuples are what compares and hashes
        with pytest.raises(UsageError, match=path.rsplit(".", 1)[-1]):
            changed(path, wrong).check()
        count += 1
    assert count > 35


@pytest.mark.parametrize(
    "path, value",
    [("train.steps", 1e3), ("train.steps", True), ("model.tied", 1), ("data.files", ("a", 1))],
)
def test_types_that_nearly_fit(path, value):
    with pytest.raises(UsageError, match=f"{path}=.*must be"):
        changed(path, value).check()


def test_an_int_is_a_float():
    changed("optimizer.learning_rate", 1).check()
