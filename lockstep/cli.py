"""The `lockstep` command: from flags to a resolved configuration, what is printed, and exit codes.

Nothing here imports torch before the flags are parsed and valid, so `--help` and a mistyped flag answer at once.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from . import __version__, config_file, recipes
from .config import RunConfig, SamplingConfig, TrainerConfig, validate
from .errors import InputError, LockstepError
from .flags import Eval, Generate, Init, Parity, Train
from .metrics import to_json


@dataclass(frozen=True)
class Outcome:
    """What a command printed and how it ended."""

    payload: dict[str, Any]
    text: str
    code: int = 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 the run or check failed, 2 bad input, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        print(f"lockstep {__version__}")
        return 0
    try:
        flags = _parse(arguments)
        if isinstance(flags, int):
            return flags
        with contextlib.redirect_stdout(sys.stderr):  # standard output carries the outcome and nothing else
            outcome = _COMMANDS[type(flags)](flags)
        print(to_json(outcome.payload) if flags.json else outcome.text, flush=True)
        return outcome.code
    except InputError as error:
        return _fail(f"error: {error}", 2)
    except LockstepError as error:
        return _fail(f"failed: {error}", 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:  # whoever read standard output has gone; keep Python from flushing into it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _fail(message: str, code: int) -> int:
    print(f"lockstep: {message}", file=sys.stderr)
    return code


def _parse(arguments: list[str]) -> Any:
    """The command's flags, or an exit code when tyro has printed help or a usage error.

    `train` is parsed twice: once to learn what the run begins from, then with that as the defaults that flags override.
    """
    _refuse_repeated(arguments)
    named = next((argument for argument in arguments[1:] if argument in recipes.RECIPES), recipes.DEFAULT)
    commands: Any = (
        Annotated[Train, tyro.conf.subcommand("train", default=Train.of(recipes.RECIPES[named](None), recipe=""))]
        | Annotated[Generate, tyro.conf.subcommand("generate")]
        | Annotated[Eval, tyro.conf.subcommand("eval")]
        | Annotated[Parity, tyro.conf.subcommand("parity")]
        | Annotated[Init, tyro.conf.subcommand("init")]
    )
    try:
        flags = tyro.cli(commands, args=arguments, prog="lockstep", description=_DESCRIPTION)
        if isinstance(flags, Train):
            begin = Train.of(_base(flags))
            flags = tyro.cli(Train, args=arguments[1:], prog="lockstep train", default=begin)
        return flags
    except SystemExit as stop:
        return int(stop.code or 0)


_DESCRIPTION = "Reinforcement learning for language models: one model definition generates and trains, bit for bit."


def _refuse_repeated(arguments: list[str]) -> None:
    """The last of two equal flags would win in silence."""
    seen: set[str] = set()
    for argument in arguments:
        flag = argument.split("=", 1)[0].replace("_", "-")
        if flag.startswith("--") and flag in seen:
            raise InputError(f"{flag} is given twice; give it once, with all its values")
        seen.add(flag)


def _base(flags: Train) -> RunConfig:
    """What the run begins from: a recipe, --config or --resume."""
    given = {"a recipe": flags.recipe, "--config": flags.config, "--resume": flags.resume}
    used = [name for name, value in given.items() if value]
    if len(used) > 1:
        raise InputError(f"{' and '.join(used)} both say what to begin from; give one")
    if flags.resume is not None:
        if flags.run_dir is not None:
            raise InputError("--run-dir has no effect with --resume, which continues in the folder it names; remove it")
        return _resumed(flags.resume)
    if flags.config is not None:
        return config_file.load(flags.config)
    return _recipe(flags.recipe or recipes.DEFAULT, "recipe", flags.model)


def _recipe(name: str, kind: str, model: str | None) -> RunConfig:
    if name not in recipes.RECIPES:
        raise InputError(f"unknown {kind} {name!r}; {config_file.suggest(name, recipes.RECIPES)}")
    return recipes.RECIPES[name](model)


def _resumed(run_dir: Path) -> RunConfig:
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise InputError(f"--resume {run_dir}: not a run folder (it has no config.yaml)")
    return config_file.load(path)


def _refuse_changes(run_dir: Path, config: RunConfig) -> None:
    """A resumed run is the same run: nothing changes but that it may go on for longer."""
    before, after = config_file.flat(_resumed(run_dir)), config_file.flat(config)
    for name, value in after.items():
        if name == "steps" and value < before[name]:
            raise InputError(
                f"--resume {run_dir}: steps is {before[name]} there and {value} here; it may only be raised"
            )
        if name != "steps" and value != before[name]:
            raise InputError(
                f"--resume {run_dir}: {name} is {before[name]!r} there and {value!r} here; only --steps may change"
            )


def _claim_run_dir(given: Path | None, recipe: str) -> Path:
    """Create and return the run's folder: the one given, new or empty, or a new one under runs/."""
    try:
        if given is None:
            return _new_folder(Path("runs") / f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}")
        given.mkdir(parents=True, exist_ok=True)
        if any(given.iterdir()):
            raise InputError(f"--run-dir {given} is not empty; name a new folder, or continue with --resume {given}")
        return given
    except OSError as error:
        raise InputError(f"cannot make the run folder: {error}") from error


def _new_folder(wanted: Path) -> Path:
    """`wanted`, or with -2, -3, ... when another run began in the same second."""
    for number in itertools.count(1):
        path = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise AssertionError("unreachable")


def _train(flags: Train) -> Outcome:
    config = validate(flags.resolved())
    if flags.resume is not None:
        _refuse_changes(flags.resume, config)
    run_dir = flags.resume or _claim_run_dir(flags.run_dir, config.recipe)
    from .run import train

    try:
        summary = train(config, run_dir, flags.resume is not None)
    except BaseException:
        with contextlib.suppress(OSError):
            run_dir.rmdir()  # only a folder that is still empty goes
        raise
    return Outcome(summary, _table({"run folder": run_dir, "report": run_dir / "report.html"} | summary))


def _generate(flags: Generate) -> Outcome:
    from .run import generate
    from .types import SamplingParams

    sampling = SamplingParams(
        temperature=flags.temperature,
        top_k=flags.top_k,
        top_p=flags.top_p,
        min_p=flags.min_p,
        max_completion_length=flags.max_completion_length,
        n=flags.n,
        stop=flags.stop,
    )
    validate(
        RunConfig(
            seed=flags.seed,
            trainer=TrainerConfig(skip_zero_variance=False),
            sampling=SamplingConfig(
                num_generations=flags.n,
                temperature=flags.temperature or 1.0,  # 0 is greedy here
                top_k=flags.top_k,
                top_p=flags.top_p,
                min_p=flags.min_p,
                max_completion_length=flags.max_completion_length,
                stop=flags.stop,
            ),
        )
    )
    completions = generate(flags.model, flags.prompt, sampling, flags.seed, flags.device, flags.dtype)
    payload = {"model": flags.model, "prompt": flags.prompt, "completions": [asdict(one) for one in completions]}
    texts = [one.text for one in completions]
    if len(texts) > 1:
        texts = [f"--- {number} of {len(texts)}\n{text}" for number, text in enumerate(texts, start=1)]
    return Outcome(payload, "\n".join(texts))


def _eval(flags: Eval) -> Outcome:
    base = _recipe(flags.task, "task", flags.model)
    prompts = base.task.validation_prompts if flags.prompts is None else flags.prompts
    if prompts < 1:
        raise InputError(f"--prompts is {prompts}; it must be at least 1")
    task = replace(
        base.task,
        easy=flags.easy and flags.task == "sum-digits",
        data=flags.data,
        validation_data=flags.data,
        reward=flags.reward,
        validation_prompts=prompts,
    )
    length = flags.max_completion_length or base.sampling.max_completion_length
    sampling = replace(base.sampling, max_completion_length=length)
    config = replace(base, model=flags.model, task=task, sampling=sampling, device=flags.device, dtype=flags.dtype)
    from .run import evaluate

    result = evaluate(validate(config))
    return Outcome(result, _table(result))


def _parity(flags: Parity) -> Outcome:
    if flags.tokens < 1:
        raise InputError(f"--tokens is {flags.tokens}; it must be at least 1")
    from .parity import check_model

    report = check_model(flags.model, flags.tokens, flags.seed, flags.device, flags.dtype)
    return Outcome(report.to_dict(), report.render(), code=0 if report.identical else 1)


def _init(flags: Init) -> Outcome:
    from .models.init import init_folder

    summary = init_folder(flags.arch, flags.out, flags.seed, flags.tokenizer, flags.vocab_size)
    return Outcome(summary, _table(summary))


def _table(values: dict[str, Any]) -> str:
    """The scalars of `values`, aligned, one a line."""
    rows = {key: value for key, value in values.items() if not isinstance(value, (dict, list, tuple))}
    width = max(map(len, rows), default=0)
    return "\n".join(
        f"{key:<{width}}  {value:.4g}" if isinstance(value, float) else f"{key:<{width}}  {value}"
        for key, value in rows.items()
    )


_COMMANDS: dict[type, Callable[[Any], Outcome]] = {
    Train: _train,
    Generate: _generate,
    Eval: _eval,
    Parity: _parity,
    Init: _init,
}
