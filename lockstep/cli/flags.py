"""Flags of each command, as the dataclasses that tyro derives the parser and its help from."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

import tyro

from ..config import (
    GENERATION_FIELDS,
    GENERATION_LAYOUT_FIELDS,
    PARITY_LAYOUT_FIELDS,
    Attention,
    CompileConfig,
    ParallelConfig,
    RunConfig,
    TaskConfig,
    other_trainers,
    recipes,
)
from ..errors import InputError, refuse
from ..serve.settings import Settings

_Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]
_MODEL, _DATA, _FUNCTION = "DIR|ID", "PATH|ID", "MODULE:FUNCTION"  # placeholders in help texts
_SUPPRESSED = get_args(tyro.conf.Suppress[int])[1]  # marks fields that a command does not read
_SWITCH_VALUES = ("yes", "no", "true", "false", "on", "off", "0", "1")
_SHORT_FLAGS = {"--data": "--task.data", "--reward": "--task.reward"}  # short flags of train
# Flags with several values, which may look like other trainers' `section.key=value`.
_MAY_HOLD_EQUALS = ("--optimizer.lr-scales", "--optimizer.weight-decays", "--sampling.stop", "--stop")


def canonical_name(flag: str) -> str:
    """The canonical name of `flag`: with dashes for underscores, aliases resolved, and without a switch's no-."""
    *sections, name = flag.replace("_", "-").removeprefix("--").split(".")
    flag = "--" + ".".join([*sections, name.removeprefix("no-")])
    return _SHORT_FLAGS.get(flag, flag)


def list_flags(kind: type, prefix: str = "--", suppressed: bool = False) -> list[str]:
    """Every flag of a command or, if `suppressed`, those of its sections that it does not read. A switch also has a
    second name, with no-, that turns it off."""
    flags = []
    for name, hint in get_type_hints(kind, include_extras=True).items():
        plain, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        plain = next((mark for mark in marks if isinstance(mark, type)), plain)
        dashed = name.replace("_", "-")
        if isinstance(plain, type) and is_dataclass(plain):
            flags += list_flags(plain, f"{prefix}{dashed}.", suppressed)
        elif tyro.conf.Positional in marks or get_origin(hint) is ClassVar:
            continue
        elif suppressed == (_SUPPRESSED in marks):
            flags.append(f"{prefix}{dashed}")
            if plain is bool and tyro.conf.FlagCreatePairsOff not in marks:
                flags.append(f"{prefix}no-{dashed}")
    return flags


def refuse_unknown(kind: type, arguments: Sequence[str]) -> None:
    """Raise `InputError` for flags that the command does not have or read, for a switch with a value, for several
    values of --data, and for `section.key=value`."""
    known = [*list_flags(kind), *(_SHORT_FLAGS if issubclass(kind, _RunFlags) else ()), "--help"]
    given = [argument.split("=", 1)[0].replace("_", "-") for argument in arguments if argument.startswith("--")]
    _refuse_switch_values(arguments, known)
    _refuse_several_data(arguments)
    _refuse_assignments(arguments, known)
    of_training = list_flags(kind, suppressed=True)
    for_training = [flag for flag in given if flag in of_training]
    command = kind.__name__.lower()
    if for_training:
        raise InputError(f"{', '.join(for_training)} is for training, and lockstep {command} trains nothing; remove it")
    unknown = [flag + _suggest_flag(flag, known) for flag in given if flag not in known]
    if unknown:
        flags = "flag" if len(unknown) == 1 else "flags"
        raise InputError(f"unknown {flags} {', '.join(unknown)}; lockstep {command} --help lists them all")


def _refuse_switch_values(arguments: Sequence[str], known: Collection[str]) -> None:
    for argument, following in itertools.pairwise([*arguments, ""]):
        switch, joined, value = argument.partition("=")
        opposite = _opposite(switch)
        is_switch = switch.replace("_", "-") in known and opposite.replace("_", "-") in known
        refuse(
            is_switch and bool(joined or following.lower() in _SWITCH_VALUES),
            f"{switch} takes no value, and is given {value if joined else following!r}; {opposite} is its opposite",
        )


def _opposite(switch: str) -> str:
    """`--section.no-name` for `--section.name`, and the reverse."""
    return re.sub(r"^--(.*[.])?(no-)?", lambda found: f"--{found[1] or ''}{'' if found[2] else 'no-'}", switch)


def _refuse_several_data(arguments: Sequence[str]) -> None:
    for flag, *values in zip(arguments, arguments[1:], arguments[2:], strict=False):
        are_values = not any(value.startswith("--") or value in recipes.RECIPES for value in values)
        refuse(
            flag.startswith("--") and are_values and canonical_name(flag) == "--task.data",
            f"{flag} takes one file, folder or hub id, and is given {' and '.join(values)}; put files into one folder",
        )


def _refuse_assignments(arguments: Sequence[str], known: list[str]) -> None:
    """Raise `InputError` for `section.key=value`, other trainers' way to give settings."""
    first_flag = next((i for i, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    flag = ""
    for i, word in enumerate(arguments):
        if word.startswith("-"):
            flag = canonical_name(word)
        key, equals, _ = word.partition("=")
        may_be_value = i > first_flag and (flag in _MAY_HOLD_EQUALS or arguments[i - 1].startswith("-"))
        dots = "*" if i < first_flag else "+"  # after a flag, `key=value` may be the flag's value
        if equals and not may_be_value and re.fullmatch(rf"[+]*[A-Za-z]\w*([.]\w+){dots}", key):
            suggestion = _suggest_flag("--" + key.lstrip("+").replace("_", "-"), known)
            raise InputError(f"{word} is no flag; settings are given as --section.key VALUE{suggestion}")


def _suggest_flag(flag: str, known: list[str]) -> str:
    """A suggestion of what was meant: a flag without its section, another trainer's name for it, or a similar name."""
    last = re.split("[.]|--", flag)[-1]
    if last in other_trainers.UNSUPPORTED_FLAGS:
        return f" ({other_trainers.UNSUPPORTED_FLAGS[last]})"
    ours = other_trainers.EQUIVALENT_FLAGS.get(last, "")
    equivalent = [name for name in (ours, f"--{ours.rpartition('.')[2]}") if name in known][:1]
    same_last_part = [name for name in known if re.split("[.]|--", name)[-1] == last]
    close = (
        equivalent + same_last_part
        or difflib.get_close_matches(flag, known, n=1, cutoff=0.9)
        or [name for name in known if name.endswith(f"-{last}")]
        or difflib.get_close_matches(flag, known, cutoff=0.75)
    )
    return f" (did you mean {' or '.join(close)}?)" if close else ""


@dataclass(frozen=True)
class _TaskFlags(TaskConfig):
    """Where prompts and rewards come from."""

    data: Annotated[str | None, tyro.conf.arg(metavar=_DATA, aliases=["--data"])] = None
    reward: Annotated[tuple[str, ...], tyro.conf.arg(metavar=f"{_FUNCTION} ...", aliases=["--reward"])] = ()


@dataclass(frozen=True)
class _RunFlags(RunConfig):
    """A run's configuration: a recipe, or a replayed configuration, with flags on top."""

    recipe: Annotated[
        str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE", help_behavior_hint="(default: sum-digits)")
    ] = ""
    """Named configuration to begin from: sum-digits, word-arithmetic, gsm8k or dataset."""
    model: Annotated[str | None, tyro.conf.arg(metavar=_MODEL)] = None
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE.yaml")] = None
    """Begin from this configuration (a run folder's config.yaml) instead of a recipe. Keys that it leaves out are as in
    the recipe that it names."""
    task: _TaskFlags = field(default_factory=_TaskFlags)
    json: _Switch = False
    """Print one JSON object on standard output."""

    @classmethod
    def from_config(cls, config: RunConfig) -> Self:
        return cls(**_flag_values(config))

    def with_config(self, config: RunConfig) -> Self:
        """These flags with the settings of `config`."""
        return replace(self, **_flag_values(config))

    def to_config(self) -> RunConfig:
        values = {item.name: getattr(self, item.name) for item in fields(RunConfig)}
        return RunConfig(**(values | {"task": TaskConfig(**vars(self.task))}))


def _flag_values(config: RunConfig) -> dict[str, Any]:
    return vars(config) | {"task": _TaskFlags(**vars(config.task))}


@dataclass(frozen=True)
class Train(_RunFlags):
    """Train a model by reinforcement learning: a recipe, or a replayed configuration, with flags on top."""

    resume: Annotated[Path | None, tyro.conf.arg(metavar="RUN_DIR")] = None
    """Continue the run in this folder from its last checkpoint; only --steps, --checkpoint, --metrics and the layout of
    processes may change."""
    resume_with_other_numerics: _Switch = False
    """Resume even if this machine's arithmetic gives other bits than the run's; the certificate records it."""
    run_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: runs/RECIPE-TIME)")] = (
        None
    )
    """Folder for everything the run writes; new or empty."""


@dataclass(frozen=True)
class Precompile(_RunFlags):
    """Make the graphs and kernels of a run ahead of time, so that later runs start faster. Takes the flags of train."""


@dataclass(frozen=True)
class Plan(_RunFlags):
    """Show how much GPU memory a run would take, term by term, and what would fit. Takes the flags of train. Loads only
    the tokenizer and the task's prompts, and needs no GPU."""

    world: int = 1
    """GPUs that share the run."""
    device_memory_gib: float = 0.0
    """Memory of each; 0 is this machine's: its GPU's or, without one, the host's, which the processes share."""


def _section_with_fields(section: type, names: Collection[str]) -> tuple[Any, ...]:
    """Annotations for a `section` of which a command reads only the fields `names`, the only ones tyro offers."""
    hints = get_type_hints(section, include_extras=True)
    hidden = [(f.name, Annotated[hints[f.name], _SUPPRESSED], copy(f)) for f in fields(section) if f.name not in names]
    namespace = {"__new__": lambda _, **values: section(**values), "__doc__": section.__doc__}
    kind = make_dataclass(section.__name__, hidden, bases=(section,), namespace=namespace, frozen=True)
    return kind, tyro.conf.arg(constructor=kind)


_GENERATION_GRAPHS = _section_with_fields(CompileConfig, GENERATION_FIELDS)
_GENERATION_LAYOUT = _section_with_fields(ParallelConfig, GENERATION_LAYOUT_FIELDS)
_PARITY_LAYOUT = _section_with_fields(ParallelConfig, PARITY_LAYOUT_FIELDS)


@dataclass(frozen=True, kw_only=True)
class _ModelFlags:
    """The flags shared by commands that load a model."""

    model: Annotated[str, tyro.conf.arg(metavar=_MODEL)]
    """Hugging Face folder or hub id."""
    seed: int = 0
    """Seed of sampling."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto uses the GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype; auto is bfloat16 on a GPU and float32 on a CPU."""
    attention: Attention = "native"
    """flex: FlexAttention, for --attention-mask."""
    attention_mask: Annotated[str | None, tyro.conf.arg(metavar=_FUNCTION)] = None
    """flex only: which keys a query attends to, by the positions of both."""
    compile: Annotated[CompileConfig, *_GENERATION_GRAPHS] = field(default_factory=CompileConfig)


@dataclass(frozen=True, kw_only=True)
class _ResultFlags(_ModelFlags):
    """The flags of those commands that end with a result and may run on several processes."""

    parallel: Annotated[ParallelConfig, *_GENERATION_LAYOUT] = field(default_factory=ParallelConfig)
    json: _Switch = False
    """Print one JSON object."""


def _own_flags_first(kind: Any) -> Any:
    """Order a command's flags for its help: required ones, its own, inherited ones."""
    inherited = {item.name for base in filter(is_dataclass, kind.__mro__[1:]) for item in fields(base)}

    def rank(item: Field) -> int:
        if item.default is item.default_factory is MISSING:
            return 0
        return 2 if item.name in inherited else 1

    kind.__dataclass_fields__ = {item.name: item for item in sorted(fields(kind), key=rank)}
    return kind


@_own_flags_first
@dataclass(frozen=True, kw_only=True)
class Generate(_ResultFlags):
    """Generate from one prompt, or from several in a file. The text appears as it is generated."""

    prompt: str | None = None
    """Text to continue as it is (no chat template); with --system-prompt, a user message."""
    prompts: Annotated[str | None, tyro.conf.arg(metavar=_DATA)] = None
    """Instead of --prompt: rows with a `prompt` (text or chat messages), or a .txt file with one prompt per line."""
    prompt_column: str = TaskConfig.prompt_column
    """Column of --prompts that holds the prompt."""
    system_prompt: str | None = None
    """System message for prompts without one; a text prompt becomes a chat of one user message."""
    chat_template_kwargs: tuple[str, ...] = ()
    """Variables of the chat template as NAME=VALUE, the value in JSON: enable_thinking=false."""
    n: int = 1
    """Completions per prompt."""
    max_completion_length: int = 128
    """Maximum number of new tokens per completion."""
    temperature: float = 1.0
    """Softmax temperature; 0 is greedy."""
    top_p: float = 1.0
    """Keep the most likely tokens up to this probability mass; 1 is off."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 is off."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the most likely one; 0 is off."""
    stop: tuple[str, ...] = ()
    """Stop strings."""
    json: _Switch = False
    """Print completions, tokens and log-probabilities as one JSON object."""


@_own_flags_first
@dataclass(frozen=True, kw_only=True)
class Chat(_ModelFlags):
    """Talk to a model. /reset forgets the conversation, /quit or Ctrl-D ends it, Ctrl-C stops an answer."""

    system_prompt: str | None = None
    """System message before the conversation."""
    plain: _Switch = False
    """Do not use the model's chat template; the model continues the text that was typed."""
    chat_template_kwargs: tuple[str, ...] = ()
    """Variables of the chat template as NAME=VALUE, the value in JSON: enable_thinking=false."""
    max_completion_length: int = 1024
    """Maximum number of new tokens per answer; the model's context may leave room for fewer."""
    temperature: float = 0.7
    """Softmax temperature; 0 is greedy."""
    top_p: float = 0.95
    """Keep the most likely tokens up to this probability mass; 1 is off."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 is off."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the most likely one; 0 is off."""


@_own_flags_first
@dataclass(frozen=True, kw_only=True)
class Serve(_ModelFlags, Settings):
    """Serve a model over HTTP with OpenAI's API: chat, completions, and token ids in and out."""

    served_model_name: Annotated[str | None, tyro.conf.arg(help_behavior_hint="(default: as --model)")] = None
    """Name of the model for clients."""
    chat_template_kwargs: tuple[str, ...] = ()
    """Variables of the chat template as NAME=VALUE, the value in JSON; a request may override them."""


@_own_flags_first
@dataclass(frozen=True, kw_only=True)
class Eval(_ResultFlags):
    """Measure a model on a task: mean reward and pass@k, with 95 % intervals over the problems."""

    task: Annotated[str, tyro.conf.arg(metavar="NAME")]
    """Recipe whose task to evaluate on: sum-digits, word-arithmetic, gsm8k or dataset."""
    easy: bool = True
    """sum-digits: the easy form that a tiny model trains on; --no-easy for the full form."""
    data: Annotated[str | None, tyro.conf.arg(metavar=_DATA)] = None
    """Rows to evaluate on (gsm8k and dataset)."""
    held_out: _Switch = False
    """Use the last --prompts rows of --data, not the first: train holds these out if it has no validation data."""
    split: str = TaskConfig.split
    """Split of a Hugging Face dataset."""
    prompt_column: str = TaskConfig.prompt_column
    """Column of --data that holds the prompt."""
    system_prompt: str | None = None
    """System message for prompts without one; a text prompt becomes a chat of one user message."""
    chat_template_kwargs: tuple[str, ...] = ()
    """Variables of the chat template as NAME=VALUE, the value in JSON: enable_thinking=false."""
    filter_overlong_prompts: _Switch = False
    """Leave out rows whose prompt is too long for the model, and report how many; off: such rows are an error."""
    reward: Annotated[tuple[str, ...], tyro.conf.arg(metavar=f"{_FUNCTION} ...")] = ()
    """Reward functions; a dataset task needs one."""
    reward_weights: tuple[float, ...] = ()
    """One weight per reward function; empty for all ones."""
    environment: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """What answers the model, as task.environment of train."""
    tools: Annotated[tuple[str, ...], tyro.conf.arg(metavar=f"{_FUNCTION} ...")] = ()
    """Functions that the model may call, as task.tools."""
    allow_unsandboxed: _Switch = False
    """Let the tool python run programs that cannot be isolated, as task.allow_unsandboxed."""
    environment_timeout: float = TaskConfig.environment_timeout
    """Seconds that the environment may take to answer before its trajectory is left out; 0 is no limit."""
    max_environment_failures: int = TaskConfig.max_environment_failures
    """How many trajectories in a row whose environment fails end the evaluation."""
    max_turns: int = TaskConfig.max_turns
    """Maximum number of completions of a trajectory in an environment."""
    max_response_length: int = TaskConfig.max_response_length
    """Maximum number of tokens after the prompt in an environment; 0 is max_turns times max_completion_length."""
    prompts: int | None = None
    """Maximum number of prompts to evaluate; the recipe's number by default."""
    n: int = 1
    """Completions per prompt."""
    k: tuple[int, ...] = ()
    """Which pass@k to estimate, each at most n; the powers of two up to n by default."""
    temperature: Annotated[float | None, tyro.conf.arg(help_behavior_hint="(default: 0 for n 1, or the recipe's)")] = (
        None
    )
    """Softmax temperature; 0 is greedy."""
    pass_reward: Annotated[str | None, tyro.conf.arg(metavar="FUNCTION")] = None
    """Name of the reward function that decides whether a completion passes; the task's first by default."""
    pass_threshold: float = 1.0
    """A completion passes if that function's value is at least this."""
    max_completion_length: int | None = None
    """Maximum number of new tokens per completion; the recipe's number by default."""
    stop: tuple[str, ...] = ()
    """Stop strings, as sampling.stop."""


@dataclass(frozen=True)
class Report:
    """Write a run's report.html again, or one page that compares several runs."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """Run folders; several are compared."""
    out: Annotated[
        Path | None, tyro.conf.arg(metavar="FILE.html", help_behavior_hint="(default: RUN_DIR/report.html)")
    ] = None
    """File to write; RUN_DIR/report.html by default. Required for several runs."""
    json: _Switch = False
    """Print one JSON object."""


@dataclass(frozen=True)
class Replay:
    """Sample a trajectory of a run again, alone, with the weights of its step, and compare it bit by bit."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """Run folder."""
    trajectory: Annotated[str, tyro.conf.arg(metavar="STEP/GROUP/SAMPLE")]
    """The trajectory's numbers in rollouts.jsonl, such as 0/0/0 for the first."""
    call_tools: _Switch = False
    """Call the environment again; by default its recorded answers are used."""
    json: _Switch = False
    """Print one JSON object."""


@_own_flags_first
@dataclass(frozen=True, kw_only=True)
class Parity(_ResultFlags):
    """Check that generator and trainer give a model's tokens the same log-probabilities, bit for bit."""

    tokens: int = 4000
    """Minimum number of tokens to check; all completions of a prompt are checked."""
    compile: CompileConfig = field(default_factory=CompileConfig)
    parallel: Annotated[ParallelConfig, *_PARITY_LAYOUT] = field(default_factory=ParallelConfig)


@dataclass(frozen=True)
class Init:
    """Make a model folder with random weights."""

    arch: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ARCH")]
    """Architecture; an unknown name lists them all."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Folder to write."""
    seed: int = 0
    """Seed of the weights."""
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """Tokenizer to put in the folder."""
    vocab_size: int | None = None
    """Rows of the embedding; the architecture's or the tokenizer's by default."""
    json: _Switch = False
    """Print one JSON object."""
