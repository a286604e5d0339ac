"""Loads users' functions by name: `module:function` or `path.py:function`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import InputError, did_you_mean, refuse

MAX_TEXT = 300  # characters of a user's text in a message
IMMUTABLE_TYPES = frozenset((int, str, float, bool, type(None)))
RENAMED_MODULES = {  # reward modules by their names in configurations of older versions
    "lockstep.tasks.gsm8k": "lockstep.environments.tasks.gsm8k",
    "lockstep.tasks.mathematics": "lockstep.environments.rewards.mathematics",
    "lockstep.tasks.sum_digits": "lockstep.environments.tasks.sum_digits",
}


def load_function(spec: str, what: str, other_forms: str = "", kind: str = "function") -> Callable[..., Any]:
    """The function that `spec` names, as module:function or path.py:function. A module may be in the current folder, as
    for `python -m`. Errors name `what` it is for, and its `kind`. `InputError`: the spec has another form, the file or
    module cannot be imported or changes torch's defaults, or it has no such function."""
    function = load_object(spec, what, other_forms, kind)
    source, _, name = spec.rpartition(":")
    if not callable(function):
        raise InputError(f"{what}: {source} has no {kind.lower()} {name!r}")
    try:
        inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise InputError(f"{what}: {name} does not say what it takes ({error}); wrap it in a def") from error
    return function


def load_object(spec: str, what: str, other_forms: str, kind: str) -> Any:
    """Like `load_function`, for an object of any type."""
    source, _, name = spec.rpartition(":")
    if not source or not name:
        separator = "," if other_forms else " or"
        raise InputError(f"{what} must be module:{kind}{separator} path.py:{kind}{other_forms}")
    before = _torch_defaults()
    try:
        module = _import_file(Path(source)) if source.endswith(".py") else _import_module(source)
    except FileNotFoundError as error:
        raise InputError(f"{what}: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        said = f"{type(error).__name__}: {one_line(error)}{failing_line(error)}"
        raise InputError(f"{what}: importing {source} raised {said}") from error
    finally:
        changed = _restore_torch_defaults(before)
    instead = "leave it, and give the tensors made there their own"
    refuse(bool(changed), f"{what}: importing {source} sets torch's {changed}; {instead}")
    if not hasattr(module, name):
        public = [known for known in vars(module) if not known.startswith("_")]
        question = did_you_mean(name, public, cutoff=0.6)
        raise InputError(f"{what}: {source} has no {kind.lower()} {name!r}{question and f'; {question}'}")
    return getattr(module, name)


def source_file(spec: str) -> str | None:
    """The file of the function that `spec` names as module:function or path.py:function, whether or not it exists; None
    for other forms, for a module that is not found, and for one of this package."""
    source = spec.rpartition(":")[0]
    if source.endswith(".py"):
        return source
    if not all(map(str.isidentifier, source.split("."))) or source.partition(".")[0] == __package__:
        return None
    _append_to_search_path(os.getcwd())
    try:
        found = importlib.util.find_spec(source)
    except (ImportError, ValueError):  # no such package; or a module made by hand
        return None
    return found.origin if found is not None and found.has_location else None


def failing_line(error: BaseException) -> str:
    """Where in a user's code an error arose; empty if that is unknown, or part of the error."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # without the function here that caught it
    frames = [f for f in frames if f.filename not in (__file__, importlib.__file__) and f.filename[0] != "<"]
    if not frames or isinstance(error, SyntaxError):
        return ""
    libraries = tuple(path + os.sep for name, path in sysconfig.get_paths().items() if name.endswith("lib"))
    outside_libraries = [f for f in frames if not f.filename.startswith(libraries)]
    last = (outside_libraries or frames)[-1]
    return f" ({last.filename}, line {last.lineno})"


def _torch_defaults() -> dict[str, Any]:
    """torch's default dtype and device; empty if torch is not imported."""
    torch = sys.modules.get("torch")
    return {} if torch is None else {"dtype": torch.get_default_dtype(), "device": torch.get_default_device()}


def _restore_torch_defaults(before: dict[str, Any]) -> str:
    """Restore torch's defaults to `before`. Returns which had changed, and to what; empty for none."""
    changed = {name: now for name, now in _torch_defaults().items() if name in before and now != before[name]}
    for name in changed:
        is_cpu = str(before[name]) == "cpu"  # then unset it: a default device that is set costs every call a little
        getattr(sys.modules["torch"], f"set_default_{name}")(None if is_cpu else before[name])
    return " and ".join(f"default {name} to {now}" for name, now in changed.items())


def copy_nested(given: Any, what: str) -> Any:
    """A deep copy of the lists and dicts in messages, rows or arguments, since a user's function may change what it is
    given, or gave. `InputError`, naming `what`: one of them contains itself."""
    try:
        if isinstance(given, dict):
            return dict(zip(given, copy_nested(list(given.values()), what), strict=True))
        if isinstance(given, list):
            return [one if type(one) in IMMUTABLE_TYPES else copy_nested(one, what) for one in given]
        return given
    except RecursionError:
        raise InputError(f"{what} contains itself, or is nested too deep") from None


def _import_module(name: str) -> ModuleType:
    _append_to_search_path(os.getcwd())
    return importlib.import_module(RENAMED_MODULES.get(name, name))


def _append_to_search_path(folder: str) -> None:
    """Add a folder to the module search path: last, so that no file there hides an installed package."""
    if folder not in sys.path:
        sys.path.append(folder)


def _import_file(path: Path) -> ModuleType:
    """Import a file as a module of its own, once per path, so that functions from it share its state; it can import
    modules beside it. The running script is not imported again."""
    if not path.is_file():
        raise FileNotFoundError(f"file {path} does not exist")
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is not None and path.resolve() == Path(script).resolve():
        return sys.modules["__main__"]
    name = f"_user_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        _append_to_search_path(str(path.parent.resolve()))
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def is_unicode(text: str) -> bool:
    """Whether a text has no lone surrogate, which tokenizers refuse and UTF-8 files cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def as_input_error(what: str) -> Iterator[None]:
    """A context that turns what a user's code raises into an `InputError` whose message begins with `what`."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise InputError(f"{what} {type(error).__name__}: {one_line(error)}") from error


def safe_str(value: Any, form: Callable[[Any], str] = str) -> str:
    """The text of a user's object, even if its code raises."""
    try:
        return form(value)
    except Exception:
        return f"(a {type(value).__name__} that has no text)"


def one_line(value: Any, form: Callable[[Any], str] = str) -> str:
    """The text of `value` for a message: truncated if long, with newlines and control characters escaped."""
    text = safe_str(value, form)
    text = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
