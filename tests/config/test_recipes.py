"""What the recipes promise of themselves."""

from __future__ import annotations

from lockstep.algorithms.dapo import DAPO
from lockstep.config.recipes import RECIPES
from lockstep.environments import make_task
from lockstep.models.tokenizer import byte_tokenizer


def test_the_first_recipe_pays_for_an_answer_that_ends() -> None:
    """Its rewards do not: a right tag counts whatever follows it, and the model learned to fill the limit."""
    config = RECIPES["sum-digits"](None)
    limit, loss = config.sampling.max_completion_length, config.loss
    task, tokenizer = make_task(config.task, config.trainer.prompts_per_step), byte_tokenizer()

    def penalty(length: int) -> float:
        return DAPO().penalty(loss, length, limit)

    examples = [problem.worked_example or "" for problem in task.validation_problems()]
    lengths = {len(tokenizer.encode(example, add_special_tokens=False)) + 1 for example in examples}
    assert {penalty(length) for length in lengths} == {0.0}
    assert penalty(limit) == -1.0 and penalty(max(lengths) + 2) < 0  # as much as a right answer is worth
