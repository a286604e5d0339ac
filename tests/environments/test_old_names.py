"""Names of modules that configurations of older versions hold."""

import pytest

from lockstep.user_functions import RENAMED_MODULES, load_function


@pytest.mark.parametrize(("module", "name"), [("gsm8k", "gsm8k_reward"), ("sum_digits", "correct")])
def test_a_reward_is_found_by_the_name_of_its_old_module(module: str, name: str) -> None:
    old = f"lockstep.tasks.{module}"
    assert load_function(f"{old}:{name}", "a reward").__module__ == RENAMED_MODULES[old]
