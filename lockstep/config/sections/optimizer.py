"""Section `optimizer`."""

from dataclasses import dataclass
from typing import Literal

from .section import Section, at_least, between


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """AdamW on fp32 masters."""

    learning_rate: float = at_least(0, default=1e-6)
    """Largest learning rate: after warm-up, before decay."""
    beta1: float = between(0, 0.999999, default=0.9)
    """Decay of the mean of the gradients."""
    beta2: float = between(0, 0.999999, default=0.95)
    """Decay of the mean of their squares."""
    epsilon: float = at_least(1e-20, default=1e-8)
    """Added to the root of the mean square."""
    weight_decay: float = at_least(0, default=0.0)
    """Decoupled weight decay of matrices, not of norm weights."""
    max_grad_norm: float = at_least(0, default=1.0)
    """Clip by global norm; 0 is off."""
    warmup_steps: int = at_least(0, default=0)
    """Steps of linear warm-up."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Decay over the run after warm-up."""
    router_bias_rate: float = between(0, 1, default=0.0)
    """Balance experts that are chosen with a bias (DeepSeek-V3): with each update an expert's bias goes up by this when
    it had fewer tokens than the mean, and down when it had more; 0 leaves the biases as they are."""
