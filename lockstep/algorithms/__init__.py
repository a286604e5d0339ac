"""The algorithms of policy optimization, a file each: advantages, weights, and a loss a token."""

from ..config import LossConfig
from .algorithm import Algorithm as Algorithm
from .dapo import DAPO
from .dr_grpo import DrGRPO
from .grpo import GRPO
from .losses import TokenValues as TokenValues
from .sft import SFT

ALGORITHMS: dict[str, type[Algorithm]] = {
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "dapo": DAPO,
    "sft": SFT,
}
SUPERVISED = "sft"  # of the warm-up's steps


def algorithm_of(config: LossConfig) -> Algorithm:
    """The algorithm that `loss.loss_type` names, with the settings of `config`."""
    return ALGORITHMS[config.loss_type].of(config)


def supervised(config: LossConfig) -> Algorithm:
    """The algorithm of supervised steps, with the settings of `config`."""
    return ALGORITHMS[SUPERVISED].of(config)
