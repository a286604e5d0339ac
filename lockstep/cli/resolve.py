"""Parses arguments into a command's flags: a flag overrides the YAML file, which overrides the recipe."""

from __future__ import annotations

import functools
import operator
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..api import load_run_config
from ..config import RunConfig, ineffective_settings, newly_ineffective, recipes, reset_to_defaults, yaml_file
from ..errors import InputError, refuse
from ..machine import is_multi_process, pause_gc_for_imports, report_if_slow, require_address_space, torchrun_launch
from .commands import COMMANDS, recipe
from .flags import Plan, Precompile, Train, canonical_name, refuse_unknown

_Run = Train | Precompile | Plan  # commands whose flags are a run's configuration
_COMMANDS: dict[str, Any] = {kind.__name__.lower(): kind for kind in COMMANDS}
_DESCRIPTION = "Reinforcement learning for language models: one model definition generates and trains, bit for bit."
# Help comes from docstrings only: for comments tyro would read and tokenize every source file at each parse.
_HELP_CONFIG = (tyro.conf.HelptextFromCommentsOff,)


def parse(arguments: list[str]) -> Any:
    """The command's flags, or an exit code if tyro has printed help or a usage error."""
    given = _given_settings(arguments)
    kind: Any = _COMMANDS.get(arguments[0]) if arguments else None
    if kind is not None:
        refuse_unknown(kind, arguments[1:])
        alone = "parallel.timeout" in given and not is_multi_process()
        refuse(alone, "parallel.timeout has no effect in one process; start several with torchrun")
    elif arguments and not arguments[0].startswith("-"):
        raise InputError(f"unknown command {arguments[0]!r}; {yaml_file.suggest(arguments[0], _COMMANDS)}")
    try:
        if kind is None:  # help, or no command
            return _parse_overview(arguments)
        if issubclass(kind, _Run):
            return _parse_run(kind, arguments, given)
        flags = _parse_command(kind, arguments)
        if (layout := getattr(flags, "parallel", None)) is not None:
            _refuse_ineffective(((layout.path(name), why) for name, why in layout.ineffective_if_given()), given)
        return flags
    except SystemExit as stop:
        return int(stop.code or 0)


def _parse_overview(arguments: list[str]) -> Any:
    named: Any = tyro.conf.subcommand
    commands: Any = functools.reduce(operator.or_, (Annotated[kind, named(name)] for name, kind in _COMMANDS.items()))
    return tyro.cli(commands, args=arguments, prog="lockstep", description=_DESCRIPTION, config=_HELP_CONFIG)


def _parse_command(kind: Any, arguments: list[str], **default: Any) -> Any:
    flags = tyro.cli(kind, args=arguments[1:], prog=f"lockstep {arguments[0]}", config=_HELP_CONFIG, **default)
    return replace(flags, **{item.name: _expand_home(getattr(flags, item.name)) for item in fields(flags)})


def _expand_home(value: Any) -> Any:
    """A flag's path, or paths, with `~` expanded, which a shell leaves in --flag=~/folder."""
    if isinstance(value, tuple):
        return tuple(map(_expand_home, value))
    return Path(os.path.expanduser(value)) if isinstance(value, Path) else value


def _parse_run(kind: Any, arguments: list[str], given: set[str]) -> _Run:
    """The flags of a command that takes a run's configuration. They are parsed with a recipe as defaults to learn what
    the run begins from, and again only if that is something else, since a parse takes a sixth of the time of a tiny
    run."""
    named = next((argument for argument in arguments[1:] if argument in recipes.RECIPES), recipes.DEFAULT)
    default = recipes.RECIPES[named](None)
    flags = _parse_command(kind, arguments, default=kind.from_config(replace(default, recipe="")))
    base = _base_config(flags, given)
    if base == replace(default, model=flags.model):
        flags = replace(flags, recipe=base.recipe)
    else:
        flags = _parse_command(kind, arguments, default=kind.from_config(base))
    return _drop_ineffective(flags, given, base)


def _given_settings(arguments: list[str]) -> set[str]:
    """The dotted names of what flags set. Raises `InputError` for duplicates, of which the last would silently win."""
    seen: dict[str, str] = {}
    flags = [argument.split("=", 1)[0].replace("_", "-") for argument in arguments if argument.startswith("--")]
    for flag in flags:
        name = canonical_name(flag)
        if name in seen:
            also = "" if seen[name] == flag else f" (as {seen[name]} before)"
            raise InputError(f"{flag} is given twice{also}; give it once, with all its values")
        seen[name] = flag
    return {name.removeprefix("--").replace("-", "_") for name in seen}


def _refuse_ineffective(ineffective: Iterable[tuple[str, str]], given: set[str]) -> None:
    for path, why in ineffective:
        refuse(path in given, f"{path} has no effect {why}")


def _drop_ineffective(flags: _Run, given: set[str], base: RunConfig) -> _Run:
    """`flags` without settings of `base` that they make ineffective. Raises `InputError` for ineffective flags."""
    config = flags.to_config()
    _refuse_ineffective(ineffective_settings(config), given)
    paths = newly_ineffective(config, base, given)
    if not paths:
        return flags
    if torchrun_launch().rank == 0:
        print(f"left out, as nothing reads it beside these flags: {', '.join(paths)}", file=sys.stderr)
    return flags.with_config(reset_to_defaults(config, paths))


def _base_config(flags: _Run, given: set[str]) -> RunConfig:
    """The configuration that the run begins from, before the flags `given`: a recipe, --config or --resume."""
    resume = flags.resume if isinstance(flags, Train) else None
    origins = {"a recipe": flags.recipe, "--config": flags.config, "--resume": resume}
    named = [name for name, value in origins.items() if value]
    refuse(len(named) > 1, f"{' and '.join(named)} both say what to begin from; give one")
    if isinstance(flags, Train) and resume is not None:
        if flags.run_dir is not None:
            raise InputError("--run-dir has no effect with --resume, which continues in the folder it names; remove it")
        return load_run_config(resume)
    model_flags: dict[str, Any] = {name: getattr(flags, name) for name in ("model", "arch") if name in given}
    if flags.config is not None:
        return yaml_file.load(flags.config, RECIPES, flags=model_flags)
    name = flags.recipe or recipes.DEFAULT
    base = _recipe_config(recipe(name, "recipe"), model_flags.get("model"), model_flags.get("arch"))
    if torchrun_launch().rank == 0 and (notice := recipes.random_weights_notice(name, flags.model)):
        print(notice, file=sys.stderr)
    return base


def _recipe_config(recipe: Callable[..., RunConfig], model: str | None, arch: str | None) -> RunConfig:
    """The recipe's configuration for the given model or, without one, for a random model of the architecture."""
    config = recipe(model)
    if model is not None or arch is None or (config.model, config.arch) == (None, arch):
        return config
    require_address_space()
    with report_if_slow("importing torch"), pause_gc_for_imports():
        from ..models.init import architecture
    return recipe(None, architecture(arch).hidden_size)


RECIPES = {name: functools.partial(_recipe_config, recipe) for name, recipe in recipes.RECIPES.items()}
