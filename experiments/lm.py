"""A small language model to compare mixers with: 3 layers, 64 features, a context of 64 bytes.

Command:  jax-extractor train experiments/lm.py --run-dir runs/ishe --model.mixer ishe \\
              --optimizer.learning-rate 1e-2 --data.source files --data.files book.txt
          (and the same with other mixers, rates and --train.seed; then jax-extractor compare runs/*)

Result, nats per byte on 16 validation batches after 1000 steps, the book being the King James Bible
as Debian's bible-kjv prints it (`bible -f "Gen1:1-Rev22:21"`, 4.4 MB), jax 0.10.2, 2-core x86-64 CPU:

    mixer           rate 1e-2, seeds 0, 1, 2     rate 3e-3, seed 0
    iSHE            1.607  1.627  1.626          1.638
    SHE             1.631  1.634  1.636          1.651
    MHA             1.767  1.785  1.848          1.794
    talking heads   1.752  –      –              –
    HE              1.582  –      –              –
    ME              1.579  –      –              –
    WE              1.554  –      –              –

iSHE ends below SHE and SHE below MHA with every seed; all of them are best at 1e-2, the largest rate
tried. At this size HE, WE and ME, which have far fewer parameters, end lower still (one seed). An
iSHE kernel of variance 1/D (--model.extractor.kernel-scale 1) ends at 1.629, the default 1/(L·D) at
1.607 (rate 1e-2, seed 0). 1000 steps took half a minute to three minutes, as busy as the machine was.
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
