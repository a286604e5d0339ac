"""config.yaml: writes a resolved `RunConfig` and reads it back strictly."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from ..errors import InputError, did_you_mean, refuse
from . import LEGACY_CONFIG, RunConfig, newly_ineffective, other_trainers, require_config, reset_to_defaults

ROWS_FILE = "{}.jsonl"  # file in the run folder with the rows that a script gave, by the task field that refers to it
ROWS_FIELDS = "data", "validation_data"
_MAX_DEPTH = 20  # of nested names, more than anybody writes


def save(config: RunConfig, path: Path) -> None:
    """Write every field of `config`; `load(path)` returns an equal one."""
    path.write_text(yaml.safe_dump(to_dict(config), sort_keys=False), encoding="utf-8")


Recipes = Mapping[str, Callable[[str | None, str | None], RunConfig]]  # called with the given model and architecture


def load(
    path: Path,
    recipes: Recipes | None = None,
    base: RunConfig | None = None,
    flags: Mapping[str, str] = types.MappingProxyType({}),
) -> RunConfig:
    """Read a config.yaml. A missing key has its value in `base`, by default that of its dataclass.

    With `recipes`, missing keys are those of the recipe that the file names, called with the model and architecture of
    `flags` or else of the file. The name must be a known recipe unless no key is missing, and an empty file is refused.
    Settings that the recipe chose for an algorithm or a task that the file replaces are dropped.

    Raises `InputError`, naming the file and the key, for anything unreadable, unknown, given twice or of a wrong type.
    """
    inside = path / "config.yaml"
    refuse(inside.is_file(), f"{path}: cannot be read: it is a folder; did you mean {inside}?")
    refuse(path.exists() and not path.is_file(), f"{path}: cannot be read: it is not a regular file")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)  # a SafeLoader
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    except RecursionError:
        raise InputError(f"{path}: nested too deeply") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # of the scanner: `"\UFFFFFFFF"`
        reason = " ".join(str(error).split()).replace('in "<unicode string>",', "at")
        raise InputError(f"{path}: not valid YAML: {reason}") from error
    try:
        if recipes is None:
            return _read_section({} if values is None else values, base or RunConfig(), "")
        base = _base_config(values, recipes, flags)
        config = _read_section(values, base, "")
        return reset_to_defaults(config, newly_ineffective(config, base, dict(dotted_items(values))))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def load_run(run_dir: Path) -> RunConfig:
    """The configuration of the run in a folder, which may have been moved or copied. Raises `InputError`."""
    config = load(run_dir / "config.yaml", base=LEGACY_CONFIG)
    rows = {name: path_of_rows(run_dir, name, getattr(config.task, name)) for name in ROWS_FIELDS}
    return dataclasses.replace(config, task=dataclasses.replace(config.task, **rows))  # type: ignore[arg-type]


def path_of_rows(run_dir: Path, field: str, path: str | None) -> str | None:
    """The recorded `path` of a task's `field`; of rows that a script gave, where the run folder has them now."""
    here = run_dir.resolve() / ROWS_FILE.format(field)
    return str(here) if path is not None and Path(path).name == here.name and here.is_file() else path


def check_types(config: RunConfig) -> RunConfig:
    """`config`, made in code, with every value checked against its field's type and integers converted to floats where
    needed. Raises `InputError` naming the first of a wrong type."""
    require_config(config)
    return _read_section(to_dict(config), config, "")


def to_dict(config: Any) -> dict[str, Any]:
    """The configuration as plain JSON and YAML values: dicts, lists, strings, numbers, booleans, None."""
    return {key: _plain(value) for key, value in dataclasses.asdict(config).items()}


def flatten(config: Any) -> dict[str, Any]:
    """`to_dict` with dotted names, such as `sampling.top_p`."""
    return dict(dotted_items(to_dict(config)))


def dotted_items(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values, nested ones with dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping) and prefix.count(".") < _MAX_DEPTH:
            yield from dotted_items(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def suggest(name: str, allowed: Iterable[str]) -> str:
    """Words to follow "unknown NAME": close matches, and everything that is allowed."""
    names = list(allowed)
    question = did_you_mean(name, names, most=3, cutoff=0.5)
    return f"{question} allowed: {', '.join(names)}".lstrip()


_NUMBERS = {  # fewer than plain YAML's, as `save` writes all other texts without quotes
    "int": re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$"),
    "float": re.compile(
        r"([-+]?[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+][0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
    ),
}


class _StrictLoader(yaml.SafeLoader):
    """A SafeLoader that refuses a key given twice (plain YAML would silently take the last).

    Its booleans and numbers are YAML 1.2's: `parity: off` is the word, not False; `1:30` is not 90, nor `010` 8.
    """

    yaml_implicit_resolvers: typing.ClassVar = {
        first: [
            (tag, _NUMBERS.get(tag.rpartition(":")[2], pattern))
            for tag, pattern in resolvers
            if tag != "tag:yaml.org,2002:bool" or first in "tTfF"
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:  # thousands of digits; `!!bool maybe`
            kind = node.tag.rpartition(":")[2]
            said = error if isinstance(error, ValueError) else f"{node.value!r} is no {kind}"
            raise yaml.constructor.ConstructorError(None, None, str(said), node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = str(key_node.value)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _base_config(values: Any, recipes: Recipes, flags: Mapping[str, str]) -> RunConfig:
    """The configuration that supplies a file's missing keys: that of the recipe it names."""
    if not values and values in (None, {}):
        raise InputError(f"the file holds no key; name what it begins from, such as recipe: {next(iter(recipes))}")
    name = values.get("recipe") if isinstance(values, dict) else None
    if name in (None, RunConfig.recipe):
        return RunConfig()
    if isinstance(name, str) and name in recipes:
        given = {key: value for key, value in (values | flags).items() if isinstance(value, str)}
        return recipes[name](given.get("model"), given.get("arch"))
    if dict(dotted_items(values)).keys() >= flatten(RunConfig()).keys():
        return RunConfig()  # an unknown recipe, but no key is missing
    raise InputError(f"recipe is {name!r}, which is none; {suggest(str(name), recipes)}")


def _suggest_key(key: str) -> str:
    """A suggestion of what was meant: a key of another section, or another trainer's key; empty if none is known."""
    their_flag = key.replace("_", "-")
    if their_flag in other_trainers.UNSUPPORTED_FLAGS:
        return other_trainers.UNSUPPORTED_FLAGS[their_flag]
    known = flatten(RunConfig())
    if key in known:  # with a dot
        section, _, last = key.partition(".")
        return f"write it within its section, as {section}: {{{last}: ...}}"
    our_flag = other_trainers.EQUIVALENT_FLAGS.get(their_flag, "")
    our_key = our_flag.removeprefix("--").replace("-", "_")
    found = [path for name in (our_key, key) for path in known if name and f".{path}".endswith(f".{name}")]
    if our_flag and not found:
        return f"that is the flag {our_flag}, and no key"
    return f"did you mean {' or '.join(found)}?" if found else ""


def _read_section(values: Any, base: Any, prefix: str) -> Any:
    """The dataclass `base` with `values` replacing its own."""
    if not isinstance(values, dict):
        where = prefix.rstrip(".") or "the file"
        raise InputError(f"{where} holds {values!r}; it must be a mapping of keys to values")
    hints = typing.get_type_hints(type(base))
    names = [item.name for item in dataclasses.fields(base)]
    changes = {}
    for key, value in values.items():
        if key not in names:
            raise InputError(f"unknown key {prefix}{key}; {_suggest_key(str(key)) or suggest(str(key), names)}")
        if isinstance(value, str) and value in base.tables.get(key, ()):
            changes[key] = value
        else:
            changes[key] = _read_value(value, getattr(base, key), hints[key], f"{prefix}{key}")
    return dataclasses.replace(base, **changes)


def _read_value(value: Any, base: Any, hint: Any, path: str) -> Any:
    """`value` as the type `hint`; a dataclass is read over `base`. Raises `InputError` saying what `path` must be."""
    if dataclasses.is_dataclass(hint):
        return _read_section(value, base, f"{path}.")
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):  # X | None
        return None if value is None else _read_value(value, None, arguments[0], path)
    if origin is tuple and isinstance(value, list):  # tuple[X, ...]
        return tuple(_read_value(inner, None, arguments[0], f"{path}[{index}]") for index, inner in enumerate(value))
    if origin is typing.Literal and any(type(value) is type(choice) and value == choice for choice in arguments):
        return value
    if hint is float and type(value) in (int, float, str):  # YAML 1.1 reads 1e-6 (no dot) as a string
        with contextlib.suppress(ValueError):
            return float(str(value))  # infinity for an integer that is too large; refused later
    elif type(value) is hint:
        return value
    raise InputError(f"{path} is {value!r}; it must be {_describe_type(hint)}")


def _describe_type(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return f"one of {', '.join(map(str, typing.get_args(hint)))}"
    if typing.get_origin(hint) is tuple:
        return f"a list, each item {_describe_type(typing.get_args(hint)[0])}"
    return {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}[hint]
