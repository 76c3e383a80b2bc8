"""A small language model to compare mixers with: 3 layers, 64 features, a context of 64 bytes.

Command:  jax-extractor train experiments/lm.py --run-dir runs/ishe --model.mixer ishe \\
              --optimizer.learning-rate 1e-2 --data.source files --data.files book.txt
          (and the same with other mixers, rates and --train.seed; then jax-extractor compare runs/*)

Result, nats per byte on 16 validation batches after 1000 steps, the book being the King James Bible
as Debian's bible-kjv prints it (`bible -f "Gen1:1-Rev22:21"`, 4.4 MB), jax 0.10.2, 2-core x86-64 CPU:

    mixer           rate 1e-2, seeds 0, 1, 2     3e-3     1e-3 (seed 0)
    iSHE            1.611  1.626  1.630          1.634    1.710
    SHE             1.629  1.636  1.639          1.651    1.709
    talking heads   1.752  1.760  1.796          1.781    2.097
    MHA             1.765  1.785  1.848          1.794    2.109
    HE              1.580  –      –              1.629    1.791
    ME              1.578  –      –              1.630    1.760
    WE              1.555  –      –              1.593    1.699

Every mixer is best at 1e-2, the largest rate tried. There iSHE ends below SHE, SHE below talking heads
and talking heads below MHA with every seed. At this size HE, WE and ME, which have far fewer
parameters, end lower still (one seed). An iSHE kernel of variance 1/D (--model.extractor.kernel-scale
1) ended at 1.629, the default 1/(L·D) at 1.607 (rate 1e-2, seed 0, an earlier version whose adjustment
started from other numbers). 1000 steps take half a minute on a quiet machine.
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
