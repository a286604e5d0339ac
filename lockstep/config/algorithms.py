"""The shipped algorithms: one row each, of the file that it is and of the settings that it reads.

Plain data, so that flags are checked before torch is imported; `lockstep.algorithms` has the classes.
"""

from typing import NamedTuple


class Shipped(NamedTuple):
    """One algorithm.

    Attributes:
        where: its file in `lockstep/algorithms`, and the class there.
        reads: of section `loss`, the settings that it reads and others do not; what no row names, all read.
        of_groups: its advantages compare a prompt's samples with each other.
        rewarded: it learns from rewards; else they are only reported.
        epsilon: its default.
    """

    where: str
    reads: tuple[str, ...]
    of_groups: bool = True
    rewarded: bool = True
    epsilon: float = 0.2


_CLIP = "epsilon", "epsilon_high"
_GROUPS = "beta", "dynamic_sampling"
_GRPO = (*_CLIP, *_GROUPS, "scale_rewards")
_TEMPERATURES = "sapo_temperature_pos", "sapo_temperature_neg"

SHIPPED: dict[str, Shipped] = {
    "grpo": Shipped("grpo:GRPO", _GRPO),
    "dr_grpo": Shipped("dr_grpo:DrGRPO", _GRPO),
    "dapo": Shipped("dapo:DAPO", (*_GRPO, "overlong_buffer", "overlong_penalty")),
    "gspo": Shipped("gspo:GSPO", _GRPO),
    "cispo": Shipped("cispo:CISPO", ("epsilon_high", *_GROUPS, "scale_rewards")),
    "sapo": Shipped("sapo:SAPO", (*_TEMPERATURES, *_GROUPS, "scale_rewards")),
    "dppo": Shipped("dppo:DPPO", (*_GRPO, "divergence_type", "clip_ratio_c"), epsilon=0.15),
    "rloo": Shipped("rloo:RLOO", (*_CLIP, *_GROUPS, "normalize_advantages")),
    "reinforce_pp": Shipped("reinforce_pp:ReinforcePP", (*_CLIP, "beta"), of_groups=False),
    "reinforce_pp_baseline": Shipped("reinforce_pp:ReinforcePPBaseline", (*_CLIP, *_GROUPS)),
    "ppo": Shipped("ppo:PPO", (*_CLIP, "beta", "gamma", "lam", "vf_coef", "cliprange_value"), of_groups=False),
    "distillation": Shipped("distillation:Distillation", ("teacher",), of_groups=False, rewarded=False),
}
LOSS_TYPES = tuple(SHIPPED)
# Settings that some algorithms read, with those that do; each other setting is read by all.
READ_BY: dict[str, tuple[str, ...]] = {
    setting: tuple(name for name, row in SHIPPED.items() if setting in row.reads)
    for setting in dict.fromkeys(setting for row in SHIPPED.values() for setting in row.reads)
}
# Of those, what says how a loss bounds its own ratio: nothing where that is 1, as under `importance_sampling_mode`.
OF_THE_RATIO = (*_CLIP, *_TEMPERATURES, "divergence_type", "clip_ratio_c")
