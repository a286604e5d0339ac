"""Settings that nothing reads, because of what others are set to."""

from __future__ import annotations

from collections.abc import Iterator

from .fields import RunConfig

DATA_TASKS = ("gsm8k", "dataset")  # the tasks that read rows, and the fields of `task` that act on rows
_DATA_FIELDS = (
    *("data", "validation_data", "split", "prompt_column", "system_prompt", "chat_template_kwargs"),
    *("shuffle", "filter_overlong_prompts"),
)
# What supervised steps alone read; recipes set them, so they stay when those steps are turned off.
_WARMUP_FIELDS = ("learning_rate", "loss", "reward", "interval", "batch_size")


def without_effect(c: RunConfig) -> Iterator[tuple[str, str]]:
    """(field, why) of each setting that has no effect in `c` and is refused at any value but its default; why goes on
    after "FIELD has no effect"."""
    t, lo = c.task, c.loss
    rows = t.name in DATA_TASKS
    if not rows:
        for name in _DATA_FIELDS:
            yield f"task.{name}", f"on {t.name}; remove it, or name a recipe: gsm8k or dataset"
    if rows:
        yield "task.validation_seed", f"on {t.name}, whose validation rows are not drawn; remove it"
    if rows and not t.shuffle:
        yield "task.seed", "with task.shuffle off; remove it"
    if t.name != "sum-digits":
        yield "task.easy", f"on {t.name}; remove it"
    if t.validation_prompts == 0:
        for name in ("validation_data", "validation_interval", "validation_seed"):
            yield f"task.{name}", "with task.validation_prompts 0, which turns validation off; remove it"
    if c.model is not None:
        yield "arch", "with a model, which has an architecture of its own; remove one of the two"
    if lo.loss_type != "dapo":
        yield "loss.overlong_buffer", f"on loss_type {lo.loss_type}; use dapo or remove it"
    if lo.overlong_buffer == 0:
        yield "loss.overlong_penalty", "without loss.overlong_buffer; set that above 0, or remove the penalty"
    if c.checkpoint.interval == 0:
        yield "checkpoint.keep_last", "without checkpoints; set checkpoint.interval above 0, or remove it"
    if c.attention != "flex":
        yield "attention_mask", f"on attention {c.attention}; set attention to flex, or remove the mask"
    if "wandb" not in c.metrics.trackers:
        yield "metrics.project", "without wandb among metrics.trackers; add it or remove the project"


def unread(c: RunConfig) -> Iterator[tuple[str, str]]:
    """As `without_effect`, and the settings that a recipe may have left behind: refused where someone gives them."""
    yield from without_effect(c)
    if c.trainer.warmup_steps == 0:
        for name in _WARMUP_FIELDS:
            yield f"trainer.warmup_{name}", "with trainer.warmup_steps 0, which turns supervised steps off; remove it"
    elif c.trainer.warmup_reward == 0:
        yield "trainer.warmup_interval", "without trainer.warmup_reward; set that above 0, or remove it"
