"""The shipped algorithms: a row for each, with its file and the settings that it reads.

Plain data, so that flags can be checked before torch is imported; `lockstep.algorithms` has the classes.
"""

from typing import NamedTuple


class AlgorithmRow(NamedTuple):
    """One algorithm.

    Attributes:
        class_path: its file in `lockstep/algorithms`, and the class there.
        reads: the settings of section `loss` that it reads and not all others do; every algorithm reads those that no
            row names.
        group_relative: whether its advantages compare a prompt's samples with each other.
        uses_rewards: whether it learns from rewards; otherwise they are only reported.
        epsilon: its default.
    """

    class_path: str
    reads: tuple[str, ...]
    group_relative: bool = True
    uses_rewards: bool = True
    epsilon: float = 0.2


_CLIP = "epsilon", "epsilon_high"
_GROUPS = "beta", "dynamic_sampling"
_GRPO = (*_CLIP, *_GROUPS, "scale_rewards")
_TEMPERATURES = "sapo_temperature_pos", "sapo_temperature_neg"

ALGORITHM_TABLE: dict[str, AlgorithmRow] = {
    "grpo": AlgorithmRow("grpo:GRPO", _GRPO),
    "dr_grpo": AlgorithmRow("dr_grpo:DrGRPO", _GRPO),
    "dapo": AlgorithmRow("dapo:DAPO", (*_GRPO, "overlong_buffer", "overlong_penalty")),
    "gspo": AlgorithmRow("gspo:GSPO", _GRPO),
    "cispo": AlgorithmRow("cispo:CISPO", ("epsilon_high", *_GROUPS, "scale_rewards")),
    "sapo": AlgorithmRow("sapo:SAPO", (*_TEMPERATURES, *_GROUPS, "scale_rewards")),
    "dppo": AlgorithmRow("dppo:DPPO", (*_GRPO, "divergence_type", "clip_ratio_c"), epsilon=0.15),
    "rloo": AlgorithmRow("rloo:RLOO", (*_CLIP, *_GROUPS, "normalize_advantages")),
    "reinforce_pp": AlgorithmRow("reinforce_pp:ReinforcePP", (*_CLIP, "beta"), group_relative=False),
    "reinforce_pp_baseline": AlgorithmRow("reinforce_pp:ReinforcePPBaseline", (*_CLIP, *_GROUPS)),
    "ppo": AlgorithmRow(
        "ppo:PPO", (*_CLIP, "beta", "gamma", "lam", "vf_coef", "cliprange_value"), group_relative=False
    ),
    "distillation": AlgorithmRow("distillation:Distillation", ("teacher",), group_relative=False, uses_rewards=False),
}
LOSS_TYPES = tuple(ALGORITHM_TABLE)
# For each setting that only some algorithms read, those that do.
READ_BY: dict[str, tuple[str, ...]] = {
    setting: tuple(name for name, row in ALGORITHM_TABLE.items() if setting in row.reads)
    for setting in dict.fromkeys(setting for row in ALGORITHM_TABLE.values() for setting in row.reads)
}
# Those that bound a loss's own ratio, which `importance_sampling_mode` replaces.
RATIO_SETTINGS = (*_CLIP, *_TEMPERATURES, "divergence_type", "clip_ratio_c")
