"""Section `optimizer`."""

from dataclasses import dataclass
from typing import Literal

from ...errors import refuse
from .section import Section, at_least, between, check_range


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
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained, by patterns of their names in a Hugging Face folder, or their modules':
    model.embed_tokens, 'model.layers.[0-9].*'. They have no gradients, masters or moments, and max_grad_norm is of the
    others alone."""
    lr_scales: tuple[str, ...] = ()
    """Other learning rates as PATTERN=FACTOR, times that of every step, supervised ones too; the last that matches."""
    weight_decays: tuple[str, ...] = ()
    """Other weight decays as PATTERN=DECAY, of norm weights too; the last that matches."""
    router_bias_rate: float = between(0, 1, default=0.0)
    """Balance experts that are chosen with a bias (DeepSeek-V3): with each update an expert's bias goes up by this when
    it had fewer of the tokens trained on than the mean, and down when it had more, a prompt's counted once for each of
    its samples; 0 leaves the biases as they are."""

    offload: bool = False
    """Keep the masters and moments in the host's memory, 12 bytes a parameter, and bring them to the GPU in chunks for
    an update: the same bits on less of a GPU, and an update that takes as long as the copies."""

    def check(self) -> None:
        refuse("" in self.freeze, "optimizer.freeze has an empty pattern; name a parameter, or leave it out")
        for name in ("lr_scales", "weight_decays"):
            self.of_patterns(name)

    def of_patterns(self, name: str) -> list[tuple[str, float]]:
        """The patterns of the field `name`, which has their numbers, in order; raises `InputError` for another form."""
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
