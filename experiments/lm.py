"""A small language model to compare mixers with: 3 layers, 64 features, a context of 64 bytes.

Command:  jax-extractor train experiments/lm.py --data.source files --data.files book.txt
"""

from jax_extractor.data import DataConfig
from jax_extractor.models import ModelConfig
from jax_extractor.training import Config, OptimizerConfig, TrainConfig


def get_config() -> Config:
    """1000 steps of 16 sequences; the mixer and its rate are set on the command line."""
    return Config(
        model=ModelConfig(
            mixer="ishe", features=64, num_layers=3, num_heads=4, max_length=64, ffn_features=256
        ),
        data=DataConfig(source="stdlib"),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=100),
        train=TrainConfig(steps=1000, batch_size=16, eval_every=250, checkpoint_every=500),
    )
