"""The sizes and switches of a model, in one frozen dataclass."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from jax_extractor.errors import UsageError, unknown_name
from jax_extractor.mixers import MIXERS
from jax_extractor.mixers.common import ACTIVATIONS

Arrangement = Literal["mixer-ffn", "ffn-mixer", "mixer", "ffn", "parallel"]
Positions = Literal["auto", "learned", "sinusoidal", "rotary", "none"]
Dtype = Literal["float32", "bfloat16"]

#: Mixers whose weights depend on the offset: they take no positional embeddings.
POSITIONAL_MIXERS = frozenset({"she", "ishe", "he", "we", "me"})
#: Mixers that can rotate their queries and keys.
ROTARY_MIXERS = frozenset({"mha", "talking_heads", "cross_modal"})
#: Mixers that read `TalkingHeadsConfig`.
TALKING_MIXERS = frozenset({"talking_heads", "cross_modal"})


@dataclass(frozen=True)
class ExtractorConfig:
    """Fields that only the Extractors read."""

    kernel_scale: float | None = None
    """Standard deviation of the kernel at the start, of a matrix times √features. None: 1/√L."""
    adjust_bias: bool = False
    """Whether the adjustment has a bias."""
    adjust_activation: str = "identity"
    """Activation of the adjustment: identity, relu, gelu, silu, tanh or sigmoid."""
    method: str = "auto"
    """How the extraction sum is computed, see `ops.causal_extract`."""


@dataclass(frozen=True)
class TalkingHeadsConfig:
    """Fields that only talking-heads attention reads; cross_modal reads the last three."""

    key_heads: int | None = None
    """Key heads; None: num_heads."""
    value_heads: int | None = None
    """Value heads; None: num_heads."""
    mix_logits: bool = True
    """Whether heads are mixed before the softmax."""
    mix_weights: bool = True
    """Whether heads are mixed after the softmax."""
    position_bias: bool = False
    """Whether every softmax head learns a bias for each offset."""
    dynamic: bool = False
    """Whether both mixings get terms computed from the query's and the key's row."""
    mixing_init: Literal["auto", "identity", "orthogonal", "normal"] = "auto"
    """How the mixings start; auto: identity where square, else orthogonal."""
    logits_dropout: float = 0.0
    """Rate of the dropout after the first mixing."""
    weights_dropout: float = 0.0
    """Rate of the dropout after the second mixing."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a Transformer core and the language model on it."""

    mixer: str = "ishe"
    """Sublayer 1: she, ishe, he, we, me, mha, talking_heads or cross_modal."""
    features: int = 128
    """D, the width of every row vector."""
    num_layers: int = 4
    """M, the number of layers."""
    num_heads: int = 4
    """H, read by the mixers that have heads."""
    max_length: int = 128
    """L, the context: the training length and the number of an Extractor's offsets."""
    ffn_features: int = 512
    """Width of the feed-forward network's hidden layer."""
    ffn_activation: str = "relu"
    """Activation of the feed-forward network."""
    arrangement: Arrangement = "mixer-ffn"
    """Order of the two sublayers, one of them alone, or both in parallel."""
    pre_norm: bool = True
    """Whether a layer normalisation stands before every sublayer."""
    dropout: float = 0.0
    """Rate of the dropout on the embedding and on every sublayer's output."""
    positions: Positions = "auto"
    """What tells attention where a vector stands. auto: learned, and none for Extractors."""
    tied: bool = False
    """Whether the softmax regression shares the embedding's matrix."""
    scan_layers: bool = False
    """Whether the layers are one scanned layer: compiles once for all of them."""
    remat: bool = False
    """Whether a layer's activations are recomputed in the backward pass instead of stored."""
    dtype: Dtype = "float32"
    """Compute precision; parameters and logits are float32 always."""
    extractor: ExtractorConfig = field(default_factory=ExtractorConfig)
    talking_heads: TalkingHeadsConfig = field(default_factory=TalkingHeadsConfig)

    def resolved_positions(self) -> str:
        """The positions in force: `auto` made definite."""
        if self.positions != "auto":
            return self.positions
        return "none" if self.mixer in POSITIONAL_MIXERS else "learned"

    def dropout_rates(self) -> dict[str, float]:
        """Every dropout rate by the name of its field."""
        return {
            "dropout": self.dropout,
            "talking_heads.logits_dropout": self.talking_heads.logits_dropout,
            "talking_heads.weights_dropout": self.talking_heads.weights_dropout,
        }

    def check(self) -> None:
        """Raises UsageError naming the first field that does not fit."""
        if self.mixer not in MIXERS:
            raise unknown_name("model.mixer", self.mixer, MIXERS)
        for name in ("features", "num_layers", "num_heads", "max_length", "ffn_features"):
            if getattr(self, name) < 1:
                raise UsageError(f"model.{name}={getattr(self, name)}: choose at least 1")
        choices = {"arrangement": Arrangement, "positions": Positions, "dtype": Dtype}
        for name, known in choices.items():
            if getattr(self, name) not in get_args(known):
                raise unknown_name(f"model.{name}", getattr(self, name), get_args(known))
        activations = {
            "ffn_activation": self.ffn_activation,
            "extractor.adjust_activation": self.extractor.adjust_activation,
        }
        for name, value in activations.items():
            if value not in ACTIVATIONS:
                raise unknown_name(f"activation in model.{name}", value, ACTIVATIONS)
        for name, rate in self.dropout_rates().items():
            if not 0 <= rate < 1:
                raise UsageError(f"model.{name}={rate}: choose a rate from 0 to below 1")
        positions = self.resolved_positions()
        if positions == "rotary" and self.mixer not in ROTARY_MIXERS:
            raise UsageError(
                f"model.positions=rotary with model.mixer={self.mixer}: only "
                f"{', '.join(sorted(ROTARY_MIXERS))} rotate queries and keys; choose auto"
            )
        if positions not in ("none", "rotary") and self.mixer in POSITIONAL_MIXERS:
            raise UsageError(
                f"model.positions={positions} with model.mixer={self.mixer}: an Extractor's "
                "weights know the offset already; choose auto or none"
            )
