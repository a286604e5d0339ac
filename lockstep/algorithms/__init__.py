"""Policy optimization algorithms, one file each: advantages, weights, and a per-token loss."""

from dataclasses import replace
from pkgutil import resolve_name

from ..config import ALGORITHM_TABLE, LossConfig
from ..errors import refuse
from .algorithm import Algorithm as Algorithm
from .policy_terms import TokenValues as TokenValues
from .sft import SFT
from .user import learns_from as learns_from
from .user import user_algorithm

SUPERVISED = "sft"  # for warm-up steps
ALGORITHMS: dict[str, type[Algorithm]] = {
    **{name: resolve_name(f"{__name__}.{row.class_path}") for name, row in ALGORITHM_TABLE.items()},
    SUPERVISED: SFT,
}


def make_algorithm(config: LossConfig) -> Algorithm:
    """The algorithm that `loss.loss_type` names, with the settings of `config`. A user's algorithm is tried on a few
    tokens. `InputError`: it cannot be loaded, violates `Algorithm`'s interface, lacks its teacher, or does not read a
    setting that was given."""
    is_user_defined = ":" in config.loss_type
    algorithm = user_algorithm(config) if is_user_defined else ALGORITHMS[config.algorithm].from_config(config)
    refuse(
        algorithm.has_teacher and config.teacher is None,
        f"loss.teacher is missing: loss_type {config.loss_type} learns from a model; give its folder or hub id",
    )
    return algorithm


def supervised_algorithm(config: LossConfig) -> Algorithm:
    """The algorithm of supervised steps, with the settings of `config` but without importance sampling, as no policy
    sampled the examples."""
    return ALGORITHMS[SUPERVISED].from_config(replace(config, importance_sampling_mode=None))
