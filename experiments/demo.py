"""iSHE language model on the built-in corpus, small enough for two cores: what `make demo` runs.

Command:  jax-extractor train experiments/demo.py --run-dir runs/demo
Result:   validation loss 1.66 nats per byte; `make demo`, installation included, took 2 min 34 s
          (2-core x86-64 CPU, Python 3.11, jax 0.10.2, seed 0)
"""

from jax_extractor.models import ModelConfig
from jax_extractor.training import Config, OptimizerConfig, TrainConfig


def get_config() -> Config:
    """3 layers of 128 features, a context of 64 bytes, 400 steps of 32 sequences."""
    return Config(
        model=ModelConfig(
            mixer="ishe", features=128, num_layers=3, max_length=64, ffn_features=512
        ),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=100),
        train=TrainConfig(steps=400, batch_size=32, eval_every=100, checkpoint_every=100),
    )
