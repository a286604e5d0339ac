"""Makes the page `reference.md` when the documentation is built, from the dataclasses that define every flag."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tyro

from lockstep.cli import flags
from lockstep.config import RunConfig
from lockstep.config.recipes import RECIPES
from lockstep.config.yaml_file import flatten

INTRODUCTION = """# Reference

Made from the source when these pages are built. The field `top_p` of the section `sampling` is the flag
`--sampling.top-p`, and the key `top_p` under `sampling:` in config.yaml. A flag that is true or false takes no value;
its opposite has `no-` before its last name. "..." means one or several values. The defaults are those of a setting that
the [recipe](#recipes) leaves alone; `lockstep train RECIPE --help` shows a recipe's own.
"""
COMMANDS = (flags.Generate, flags.Chat, flags.Serve, flags.Eval, flags.Report, flags.Parity, flags.Init, flags.Replay)


def page() -> str:
    """The page's Markdown."""
    parts = [INTRODUCTION, "## lockstep train\n", f"{inspect.getdoc(flags.Train)}\n", _table(flags.Train, "")]
    parts.append(
        "`--config`, `--resume`, `--resume-with-other-numerics`, `--run-dir` and `--json` are not part of a "
        "configuration.\n"
    )
    parts += [
        "## Recipes\n",
        "What they set other than the defaults above and below, without `--model`.\n",
        recipes_table(),
    ]
    for field in dataclasses.fields(flags.Train):
        if dataclasses.is_dataclass(kind := field.default_factory):
            parts += [f"### {field.name}\n", f"{inspect.getdoc(kind)}\n", _table(kind, f"{field.name}.")]
    parts += ["## lockstep precompile\n", f"{inspect.getdoc(flags.Precompile)}\n"]
    parts += ["## lockstep plan\n", f"{inspect.getdoc(flags.Plan)}\n", _table(flags.Plan, "", beside=flags.Train)]
    for command in COMMANDS:
        parts += [f"## lockstep {command.__name__.lower()}\n", f"{inspect.getdoc(command)}\n", _table(command, "")]
        for field in dataclasses.fields(command):
            if dataclasses.is_dataclass(field.default_factory):
                parts.append(f"And the flags [`--{field.name}.*`](#{field.name}) of `lockstep train`.\n")
    return "\n".join(parts)


def recipes_table() -> str:
    """A row for each setting that some recipe has at another value than its default, and a column a recipe."""
    default = flatten(RunConfig())
    configs = {name: flatten(recipe(None)) for name, recipe in RECIPES.items()}
    rows = [("setting", "default", *configs)] + [("---",) * (2 + len(configs))]
    for name, value in default.items():
        values = [config[name] for config in configs.values()]
        if name != "recipe" and any(other != value for other in values):
            shown = [_value(other) if other != value else "" for other in values]
            rows.append((name, _value(value), *shown))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _table(kind: Any, prefix: str, beside: Any = None) -> str:
    """A row for each of the dataclass's fields, sections aside, and those that `beside` has too."""
    known = {field.name for field in dataclasses.fields(beside)} if beside else set()
    hints = typing.get_type_hints(kind, include_extras=True)
    meanings = dict(descriptions(kind))
    rows = [("flag", "value", "default", "")] + [("---",) * 4]
    for field in dataclasses.fields(kind):
        if not dataclasses.is_dataclass(field.default_factory) and field.name not in known:
            hint = hints[field.name]
            rows.append((_flag(field.name, prefix, hint), _type(hint), _default(field), _cell(meanings[field.name])))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _flag(field: str, prefix: str, hint: Any) -> str:
    """How it is written: its flag, the flag's opposite and shorter names, or its place for one without a flag."""
    extras = getattr(hint, "__metadata__", ())
    if tyro.conf.Positional in extras:
        return f"`{next(extra.metavar for extra in extras if getattr(extra, 'metavar', None))}`"
    names = [f"--{prefix}{field}", *(alias for extra in extras for alias in getattr(extra, "aliases", None) or ())]
    if hint is bool:
        names.append(f"--{prefix}no-{field}")
    return ", ".join(f"`{name.replace('_', '-')}`" for name in names)


def _default(field: dataclasses.Field) -> str:
    return "" if field.default is dataclasses.MISSING else _value(field.default)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _value(value: Any) -> str:
    if value is None or value in ((), ""):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _type(hint: Any) -> str:
    """The type as a reader sees it."""
    if hasattr(hint, "__metadata__"):
        hint = hint.__origin__
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type(argument) for argument in arguments if argument is not type(None))
    if origin is typing.Literal:
        return ", ".join(f"`{argument}`" for argument in arguments)
    if origin is tuple:
        return f"{_type(arguments[0])} ..."
    return {int: "whole number", float: "number", str: "text", bool: "", Path: "path"}[hint]


def descriptions(kind: Any) -> Iterator[tuple[str, str]]:
    """(field, the string under it) of a dataclass and those it inherits from."""
    for base in reversed(kind.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        for statement, following in zip(body, body[1:], strict=False):
            documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            if isinstance(statement, ast.AnnAssign) and documented:
                yield statement.target.id, " ".join(str(following.value.value).split())  # type: ignore[attr-defined]


def on_files(files: Any, config: Any) -> Any:
    """MkDocs calls this once it has collected the pages."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "reference.md", content=page()))
    return files
