"""The algorithms of policy optimization, a file each: advantages, weights, and a loss a token."""

from ..config import LossConfig
from .algorithm import Algorithm as Algorithm
from .cispo import CISPO
from .dapo import DAPO
from .dppo import DPPO
from .dr_grpo import DrGRPO
from .grpo import GRPO
from .gspo import GSPO
from .losses import TokenValues as TokenValues
from .reinforce_pp import ReinforcePP, ReinforcePPBaseline
from .rloo import RLOO
from .sapo import SAPO
from .sft import SFT
from .user import user_algorithm

ALGORITHMS: dict[str, type[Algorithm]] = {
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "dapo": DAPO,
    "gspo": GSPO,
    "cispo": CISPO,
    "sapo": SAPO,
    "dppo": DPPO,
    "rloo": RLOO,
    "reinforce_pp": ReinforcePP,
    "reinforce_pp_baseline": ReinforcePPBaseline,
    "sft": SFT,
}
SUPERVISED = "sft"  # of the warm-up's steps


def algorithm_of(config: LossConfig) -> Algorithm:
    """The algorithm that `loss.loss_type` names, with the settings of `config`; a user's is tried on a few tokens.

    Raises `InputError` for one that cannot be loaded, or that does not do what `Algorithm` says.
    """
    if ":" in config.loss_type:
        return user_algorithm(config)
    return ALGORITHMS[config.algorithm].of(config)


def supervised(config: LossConfig) -> Algorithm:
    """The algorithm of supervised steps, with the settings of `config`."""
    return ALGORITHMS[SUPERVISED].of(config)
