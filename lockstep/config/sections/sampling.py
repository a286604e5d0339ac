"""Section `sampling`."""

from dataclasses import dataclass

from ...errors import refuse
from .section import Section, at_least, between

MIN_TEMPERATURE = 1e-6  # except 0: logits divided by less may not be finite


@dataclass(frozen=True)
class SamplingConfig(Section):
    """How completions are sampled."""

    num_generations: int = between(1, 1 << 16, default=8)
    """Samples per prompt (the group size)."""
    temperature: float = between(0, 1e4, default=1.0)
    """Softmax temperature; 0 is greedy."""
    top_k: int = between(0, 2**31 - 1, default=0, off="0")
    """Keep the k most likely tokens; 0 is off."""
    top_p: float = between(1e-6, 1, default=1.0, off="1")
    """Keep the most likely tokens up to this probability mass; 1 is off."""
    min_p: float = between(0, 1, default=0.0, off="0")
    """Keep tokens at least this likely relative to the most likely one; 0 is off."""
    max_completion_length: int = at_least(1, default=100)
    """Maximum number of new tokens per sample."""
    stop: tuple[str, ...] = ()
    """Stop strings."""
    ignore_eos: bool = False
    """Always generate max_completion_length tokens (benchmarks)."""

    def check(self) -> None:
        refuse(
            0 < self.temperature < MIN_TEMPERATURE,
            f"sampling.temperature is {self.temperature}; it must be at least {MIN_TEMPERATURE}, or 0 for greedy",
        )
        refuse(
            not isinstance(self.stop, (list, tuple)) or not all(isinstance(text, str) for text in self.stop),
            f"sampling.stop is {self.stop!r}; it must be a list of texts",
        )
        refuse(
            "" in self.stop, "sampling.stop holds an empty string, which would end every completion at once; remove it"
        )
