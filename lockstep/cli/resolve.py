"""Parses arguments into a command's flags: a flag overrides the YAML file, which overrides the recipe."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Annotated, Any

import tyro

from ..api import load_run_config
from ..config import RunConfig, left_behind, recipes, unread, without, yaml_file
from ..errors import InputError, refuse
from ..machine import is_multi_process, pause_gc_for_imports, report_if_slow, require_address_space, torchrun_launch
from .commands import COMMANDS, recipe
from .flags import Plan, Precompile, Train, refuse_unknown, spelled_out

_Run = Train | Precompile | Plan  # commands whose flags are a run's configuration
_KINDS: dict[str, Any] = {kind.__name__.lower(): kind for kind in COMMANDS}
_DESCRIPTION = "Reinforcement learning for language models: one model definition generates and trains, bit for bit."
# Help comes from docstrings only: for comments tyro would read and tokenize every source file at each parse.
_TEXTS = (tyro.conf.HelptextFromCommentsOff,)


def parse(arguments: list[str]) -> Any:
    """The command's flags, or an exit code if tyro has printed help or a usage error. `train`, `precompile` and `plan`
    are parsed with a recipe as defaults to learn what the run begins from. Only if it begins from something else are
    they parsed again with that as defaults, since a parse takes a sixth of the time of a tiny run."""
    given = _given(arguments)
    kind: Any = _KINDS.get(arguments[0]) if arguments else None
    if kind is not None:
        refuse_unknown(kind, arguments[1:])
        alone = "parallel.timeout" in given and not is_multi_process()
        refuse(alone, "parallel.timeout has no effect in one process; start several with torchrun")
    elif arguments and not arguments[0].startswith("-"):
        raise InputError(f"unknown command {arguments[0]!r}; {yaml_file.suggest(arguments[0], _KINDS)}")
    try:
        if kind is None:  # help, or no command
            name: Any = tyro.conf.subcommand
            commands: Any = functools.reduce(operator.or_, (Annotated[k, name(n)] for n, k in _KINDS.items()))
            return tyro.cli(commands, args=arguments, prog="lockstep", description=_DESCRIPTION, config=_TEXTS)
        words: dict[str, Any] = {"args": arguments[1:], "prog": f"lockstep {arguments[0]}", "config": _TEXTS}
        if kind not in (Train, Precompile, Plan):
            flags = tyro.cli(kind, **words)
            if (layout := getattr(flags, "parallel", None)) is not None:
                _refuse_unread(((layout.path(name), why) for name, why in layout.unread()), given)
            return flags
        named = next((argument for argument in arguments[1:] if argument in recipes.RECIPES), recipes.DEFAULT)
        default = recipes.RECIPES[named](None)
        flags = tyro.cli(kind, **words, default=kind.of(default, recipe=""))
        begin = _base(flags, given)
        if begin == replace(default, model=flags.model):
            flags = replace(flags, recipe=begin.recipe)
        else:
            flags = tyro.cli(kind, **words, default=kind.of(begin))
        return _settled(flags, given, begin)
    except SystemExit as stop:
        return int(stop.code or 0)


def _given(arguments: list[str]) -> set[str]:
    """The dotted names of what flags set. Raises `InputError` for duplicates, of which the last would silently win."""
    seen: dict[str, str] = {}
    for flag in (argument.split("=", 1)[0].replace("_", "-") for argument in arguments if argument.startswith("--")):
        name = spelled_out(flag)
        if name in seen:
            also = "" if seen[name] == flag else f" (as {seen[name]} before)"
            raise InputError(f"{flag} is given twice{also}; give it once, with all its values")
        seen[name] = flag
    return {name.removeprefix("--").replace("-", "_") for name in seen}


def _refuse_unread(found: Iterable[tuple[str, str]], given: set[str]) -> None:
    for path, why in found:
        refuse(path in given, f"{path} has no effect {why}")


def _settled(flags: _Run, given: set[str], begin: RunConfig) -> _Run:
    """`flags` without settings of `begin` that they make ineffective. Raises `InputError` for ineffective flags."""
    config = flags.resolved()
    _refuse_unread(unread(config), given)
    if not (paths := left_behind(config, begin, given)):
        return flags
    if torchrun_launch().rank == 0:
        print(f"left out, as nothing reads it beside these flags: {', '.join(paths)}", file=sys.stderr)
    return flags.of_other(without(config, paths))


def _base(flags: _Run, given: set[str]) -> RunConfig:
    """The configuration that the run begins from, before the flags `given`: a recipe, --config or --resume."""
    resume = flags.resume if isinstance(flags, Train) else None
    named = {"a recipe": flags.recipe, "--config": flags.config, "--resume": resume}
    used = [name for name, value in named.items() if value]
    refuse(len(used) > 1, f"{' and '.join(used)} both say what to begin from; give one")
    if isinstance(flags, Train) and resume is not None:
        if flags.run_dir is not None:
            raise InputError("--run-dir has no effect with --resume, which continues in the folder it names; remove it")
        return load_run_config(resume)
    asked: dict[str, Any] = {name: getattr(flags, name) for name in ("model", "arch") if name in given}
    if flags.config is not None:
        return yaml_file.load(flags.config, RECIPES, flags=asked)
    name = flags.recipe or recipes.DEFAULT
    begin = _of(recipe(name, "recipe"), asked.get("model"), asked.get("arch"))
    if torchrun_launch().rank == 0 and (remark := recipes.remark(name, flags.model)):
        print(remark, file=sys.stderr)
    return begin


def _of(recipe: Callable[..., RunConfig], model: str | None, arch: str | None) -> RunConfig:
    """The recipe's configuration for the given model or, without one, for a random model of the architecture."""
    begin = recipe(model)
    if model is not None or arch is None or (begin.model, begin.arch) == (None, arch):
        return begin
    require_address_space()
    with report_if_slow("importing torch"), pause_gc_for_imports():
        from ..models.init import architecture
    return recipe(None, architecture(arch).hidden_size)


RECIPES = {name: functools.partial(_of, recipe) for name, recipe in recipes.RECIPES.items()}
