"""Section `task`, and the variables of a chat template."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import InputError, refuse
from .section import MAX_SEED, Section, at_least, between

DATA_TASKS = ("gsm8k", "dataset")  # the tasks that read data rows
# The fields that only these tasks read.
_DATA_FIELDS = (
    *("data", "split", "validation_data", "validation_split", "prompt_column", "system_prompt", "chat_template_kwargs"),
    *("shuffle", "filter_overlong_prompts"),
)
# The task's fields that `lockstep eval` has a flag of the same name for.
EVALUATION_FIELDS = (
    *("data", "split", "prompt_column", "system_prompt", "chat_template_kwargs", "filter_overlong_prompts"),
    *("reward", "reward_weights"),
    *("environment", "tools", "allow_unsandboxed", "environment_timeout", "max_environment_failures"),
    *("max_turns", "max_response_length"),
)
# Arguments that rendering a prompt sets itself.
TEMPLATE_ARGUMENTS = (
    *("messages", "conversation", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    "tokenizer_kwargs",
)


@dataclass(frozen=True)
class TaskConfig(Section):
    """Where prompts and rewards come from."""

    name: Literal["sum-digits", "word-arithmetic", "gsm8k", "dataset"] = "sum-digits"
    """Prompt source. `dataset` reads --data and needs at least one --reward, except for distillation."""
    data: str | None = None
    """JSON lines, parquet, a Hugging Face dataset folder or hub id, reasoning_gym:NAME, or verifiers:NAME."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    prompt_column: str = "prompt"
    """Column that holds the prompt: text or chat messages."""
    system_prompt: str | None = None
    """System message for prompts without one; it turns a text prompt into a chat of one user message."""
    chat_template_kwargs: tuple[str, ...] = ()
    """Variables of the model's chat template as NAME=VALUE, the value in JSON: enable_thinking=false."""
    shuffle: bool = True
    """Visit the data in a new seeded order every epoch; off: in its own order."""
    max_prompt_length: int = at_least(0, default=0)
    """Maximum number of tokens in a prompt; 0 allows what the model's context leaves beside the completion."""
    filter_overlong_prompts: bool = False
    """Leave out rows whose prompt is longer than that, and report how many; off: such rows are an error."""
    reward: tuple[str, ...] = ()
    """Reward functions as module:function or path.py:function, or the built-in math, gsm8k and reasoning_gym; empty for
    the task's own."""
    reward_weights: tuple[float, ...] = ()
    """One weight per reward function; empty for all ones."""
    reward_on_error: Literal["raise", "zero", "skip"] = "raise"
    """What to do if a reward function raises, crashes, times out or returns no finite number. raise: end the run. zero:
    count it as 0. skip: count it as None; a group with a completion that has no reward is left out of the step."""
    reward_workers: int = between(0, 1024, default=0)
    """Processes that call the rewards, on one prompt's completions at a time; 0: this process, on the whole batch."""
    reward_timeout: float = between(0, 86400, default=0.0)
    """Seconds a call may take (needs reward_workers); 0 is no limit."""
    environment: str | None = None
    """What answers the model, turn by turn: calculator; your own as module:Class or path.py:Class, which may be an
    environment_factory or a rollout_func of TRL's; verifiers, which plays the tasks of its data; or http://HOST:PORT,
    where other processes play. Left out: none, each prompt is completed once."""
    tools: tuple[str, ...] = ()
    """Functions that the model may call, as module:function or path.py:function, with docstrings to describe them, or
    the built-in python."""
    allow_unsandboxed: bool = False
    """Let the tool python run the model's programs even where they cannot be isolated from network and files."""
    max_turns: int = at_least(1, default=8)
    """Maximum number of completions of a trajectory in an environment; one that would continue is truncated."""
    max_response_length: int = at_least(0, default=0)
    """Maximum number of tokens after the prompt, sampled and given, of a trajectory in an environment; 0 is max_turns
    times max_completion_length."""
    environment_timeout: float = between(0, 86400, default=60.0)
    """Seconds that an environment may take to answer before its trajectory is left out; 0 is no limit."""
    max_environment_failures: int = at_least(1, default=16)
    """How many trajectories in a row whose environment fails, on one process, end the run."""
    easy: bool = False
    """sum-digits only: short prompts with two numbers, for a tiny model."""
    seed: int = between(0, MAX_SEED, default=42)
    """Seed of the training problems or of the data's order."""
    validation_seed: int = between(0, MAX_SEED, default=99)
    """Seed of the validation problems (sum-digits, word-arithmetic)."""
    validation_data: str | None = None
    """Validation rows; without it a dataset's last `validation_prompts` rows are held out."""
    validation_split: str | None = None
    """Split of the validation rows, in `validation_data` or, without that, in `data`; by default `split`."""
    validation_prompts: int = between(0, 1 << 20, default=20)
    """Prompts that a validation completes; 0 turns validation off."""
    validation_samples: int = between(1, 1 << 16, default=1)
    """Completions of each prompt in a validation. A single one is greedy, several are sampled as in training. Then the
    means are over all of them, and pass@N is the share of prompts of which one of N has 1 or more of the first reward
    function."""
    validation_interval: int = at_least(0, default=0)
    """Validate every this many steps, as well as before and after training; 0: only before and after."""

    def check(self) -> None:
        name, weights = self.name, self.reward_weights
        refuse(name == "gsm8k" and not self.data, "task.data is missing: gsm8k needs --data FILE.jsonl")
        refuse(name == "dataset" and not self.data, "task.data is missing: a dataset task needs --data PATH or hub id")
        template_variables(self.chat_template_kwargs)
        for field in ("environment", "prompt_column", "system_prompt", "validation_data", "validation_split"):
            refuse(getattr(self, field) == "", f"task.{field} is empty; give one, or leave it out")
        refuse(
            self.reward_timeout > 0 and self.reward_workers == 0,
            "task.reward_timeout needs task.reward_workers of at least 1: a call can only be ended with its process",
        )
        refuse(
            bool(weights) and len(weights) != len(self.reward),
            f"task.reward_weights has {len(weights)} values for {len(self.reward)} reward functions; give one each",
        )

    @property
    def turns(self) -> int:
        """The most completions that a trajectory may have."""
        return self.max_turns if self.environment or self.tools else 1

    @property
    def is_unrewarded(self) -> bool:
        """Whether neither functions nor an environment reward anything."""
        return self.name == "dataset" and not self.reward and not self.environment

    def ineffective_fields(self) -> Iterator[tuple[str, str]]:
        if self.environment is None and not self.tools:
            for name in ("max_turns", "max_response_length", "environment_timeout", "max_environment_failures"):
                hint = " (one completion's is sampling.max_completion_length)" if name == "max_response_length" else ""
                yield name, f"without task.environment{hint}; remove it, or name one"
        if "python" not in self.tools:
            yield "allow_unsandboxed", "without the tool python; remove it, or name it in task.tools"
        if self.name not in DATA_TASKS:
            for name in _DATA_FIELDS:
                yield name, f"on {self.name}; remove it, or name a recipe: gsm8k or dataset"
        else:
            yield "validation_seed", f"on {self.name}, whose validation rows are not drawn; remove it"
            if not self.shuffle:
                yield "seed", "with task.shuffle off; remove it"
        if self.name != "sum-digits":
            yield "easy", f"on {self.name}; remove it"
        if self.validation_prompts == 0:
            for name in ("data", "split", "interval", "samples", "seed"):
                yield f"validation_{name}", "with task.validation_prompts 0, which turns validation off; remove it"


def template_variables(assignments: tuple[str, ...], field: str = "task.chat_template_kwargs") -> dict[str, Any]:
    """The NAME=VALUE `assignments` of `field` as a dict. Raises `InputError` for another form or a reserved name."""
    variables: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not name.isidentifier() or name in variables:
            raise InputError(
                f"{field} holds {assignment!r}; each must be NAME=VALUE, a name once, such as enable_thinking=false"
            )
        refuse(name in TEMPLATE_ARGUMENTS, f"{field} sets {name}, which is set for every prompt; remove it")
        try:
            variables[name] = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{field}: the value of {assignment!r} is not JSON; write true, false, a number, or "
                "a text in quotes, as in 'name=\"text\"'"
            ) from error
    return variables
