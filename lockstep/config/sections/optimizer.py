"""Section `optimizer`."""

from dataclasses import dataclass
from typing import Literal

from ...errors import refuse
from .section import Section, at_least, between, check_range


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """AdamW on fp32 masters."""

    learning_rate: float = at_least(0, default=1e-6)
    """Peak learning rate: after warm-up, before decay."""
    beta1: float = between(0, 0.999999, default=0.9)
    """Decay of the first moment, the running mean of gradients."""
    beta2: float = between(0, 0.999999, default=0.95)
    """Decay of the second moment, the running mean of their squares."""
    epsilon: float = at_least(1e-20, default=1e-8)
    """Added to the root of the second moment."""
    weight_decay: float = at_least(0, default=0.0)
    """Decoupled weight decay of matrices; norm weights have none."""
    max_grad_norm: float = at_least(0, default=1.0)
    """Clip gradients to this global norm; 0 is off."""
    warmup_steps: int = at_least(0, default=0)
    """Steps of linear warm-up."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate after warm-up, over the rest of the run."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained, as patterns of their names, or their modules', in a Hugging Face folder:
    model.embed_tokens, 'model.layers.[0-9].*'. They have no gradients, masters or moments, and do not count in
    max_grad_norm."""
    lr_scales: tuple[str, ...] = ()
    """Factors on some parameters' learning rates as PATTERN=FACTOR, in supervised steps too; the last match applies."""
    weight_decays: tuple[str, ...] = ()
    """Some parameters' own weight decays as PATTERN=DECAY, norm weights included; the last match applies."""
    router_bias_rate: float = between(0, 1, default=0.0)
    """Balance experts that are chosen with a bias (DeepSeek-V3): each update raises an expert's bias by this if it got
    fewer of the tokens trained on than the mean, and lowers it if it got more. A prompt's tokens count once for each of
    its samples. 0 leaves the biases unchanged."""
    offload: bool = False
    """Keep the masters and moments in host memory, 12 bytes per parameter. Those that do not fit on the GPU come there
    in chunks for an update. Saves GPU memory with the same bits, but an update takes as long as the copies."""

    def check(self) -> None:
        refuse("" in self.freeze, "optimizer.freeze has an empty pattern; name a parameter, or leave it out")
        for name in ("lr_scales", "weight_decays"):
            self.of_patterns(name)

    def of_patterns(self, name: str) -> list[tuple[str, float]]:
        """(pattern, number) pairs of the field `name`, in order. Raises `InputError` for another form."""
        found = []
        for given in getattr(self, name):
            pattern, _, number = given.rpartition("=")
            try:
                value = float(number)
            except ValueError:
                value = -1.0
            holds = f"{self.path(name)} holds {given!r}"
            wrong = not pattern or value < 0
            refuse(wrong, f"{holds}; each must be PATTERN=NUMBER, such as model.embed_tokens=0.1")
            frozen = name == "lr_scales" and value == 0
            refuse(frozen, f"{holds}; what is not to be trained is named in optimizer.freeze")
            check_range(f"{self.path(name)} of {pattern}", value, 0, 1e6)
            found.append((pattern, value))
        return found
