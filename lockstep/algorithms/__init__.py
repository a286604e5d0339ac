"""The algorithms of policy optimization, a file each: advantages, weights, and a loss a token."""

from dataclasses import replace

from ..config import LossConfig
from ..errors import InputError
from .algorithm import Algorithm as Algorithm
from .cispo import CISPO
from .dapo import DAPO
from .distillation import Distillation
from .dppo import DPPO
from .dr_grpo import DrGRPO
from .grpo import GRPO
from .gspo import GSPO
from .losses import TokenValues as TokenValues
from .ppo import PPO
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
    "ppo": PPO,
    "distillation": Distillation,
    "sft": SFT,
}
SUPERVISED = "sft"  # of the warm-up's steps


def algorithm_of(config: LossConfig) -> Algorithm:
    """The algorithm that `loss.loss_type` names, with the settings of `config`; a user's is tried on a few tokens.

    Raises `InputError` for one that cannot be loaded, or that does not do what `Algorithm` says, or without the teacher
    that it has.
    """
    found = user_algorithm(config) if ":" in config.loss_type else ALGORITHMS[config.algorithm].of(config)
    if found.has_teacher and config.teacher is None:
        raise InputError(
            f"loss.teacher is missing: loss_type {config.loss_type} learns from a model; give its folder or hub id"
        )
    if not found.has_teacher and config.teacher is not None:
        raise InputError(f"loss.teacher has no effect: loss_type {config.loss_type} learns from none; remove it")
    return found


def supervised(config: LossConfig) -> Algorithm:
    """The algorithm of supervised steps, with the settings of `config`. Nothing sampled what they are given, so their
    losses are not weighed by how likely that is."""
    return ALGORITHMS[SUPERVISED].of(replace(config, importance_sampling_mode=None))
