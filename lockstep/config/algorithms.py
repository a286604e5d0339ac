"""The shipped algorithms: a row for each, with its file and the settings that it reads.

Plain data, so that flags can be checked before torch is imported; `lockstep.algorithms` has the classes.
"""

from typing import NamedTuple


class Shipped(NamedTuple):
    """One algorithm.

    Attributes:
        where: its file in `lockstep/algorithms`, and the class there.
        reads: the settings of section `loss` that it reads and not all others do; every algorithm reads those that no
            row names.
        of_groups: whether its advantages compare a prompt's samples with each other.
        rewarded: whether it learns from rewards; otherwise they are only reported.
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
# For each setting that only some algorithms read, those that do.
READ_BY: dict[str, tuple[str, ...]] = {
    setting: tuple(name for name, row in SHIPPED.items() if setting in row.reads)
    for setting in dict.fromkeys(setting for row in SHIPPED.values() for setting in row.reads)
}
# Those that bound a loss's own ratio, which `importance_sampling_mode` replaces.
OF_THE_RATIO = (*_CLIP, *_TEMPERATURES, "divergence_type", "clip_ratio_c")
