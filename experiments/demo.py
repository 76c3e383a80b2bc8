"""iSHE language model on the built-in corpus, small enough for two cores: what `make demo` runs.

Command:  jax-extractor train experiments/demo.py --run-dir runs/demo
Result:   a validation loss well below 2.2 nats per byte (1.85 after 200 steps of an 800-step run, 2-core CPU)
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
