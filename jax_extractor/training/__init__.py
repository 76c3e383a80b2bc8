"""Configuration, optimizer, step, loop, checkpoints and metrics."""

from jax_extractor.training.config import Config, OptimizerConfig, TrainConfig
from jax_extractor.training.evaluation import Evaluation, evaluate, evaluation_step
from jax_extractor.training.loop import Interrupted, train
from jax_extractor.training.metrics import read_metrics
from jax_extractor.training.optimizer import make_optimizer
from jax_extractor.training.run import Run, open_run
from jax_extractor.training.step import TrainState, initial_state, train_step

__all__ = [
    "Config",
    "Evaluation",
    "Interrupted",
    "OptimizerConfig",
    "Run",
    "TrainConfig",
    "TrainState",
    "evaluate",
    "evaluation_step",
    "initial_state",
    "make_optimizer",
    "open_run",
    "read_metrics",
    "train",
    "train_step",
]
