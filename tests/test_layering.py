"""Imports point down only: the package's import graph, as a table, checked against the source.

An import counts wherever it stands: at the top, in a function, or under `TYPE_CHECKING`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lockstep

PACKAGE = Path(lockstep.__file__).parent

EVERYWHERE = {"types", "config", "errors", "json_file", "fingerprints", "timings"}

# room: the rooms it may import, besides itself and EVERYWHERE. A dotted room is one module with edges of its own.
ALLOWED: dict[str, set[str]] = {
    "types": set(),
    "config": set(),
    "errors": set(),
    "json_file": set(),
    "fingerprints": set(),
    "timings": set(),
    "tokenizer": {"tokenizer_cache"},
    "tokenizer_cache": {"ops"},
    "ops": set(),
    "parallel": {"environment"},
    "models": {"ops"},
    "models.init": {"models", "random_weights", "tokenizer"},
    "graph": {"ops"},
    "generator": {"models", "graph", "ops"},
    "trainer": {"models", "graph", "parallel", "ops"},
    "tasks": set(),
    "rollout": {"tasks", "parallel"},
    "advantage": set(),
    "checkpoint": set(),
    "metrics": set(),
    "display": set(),
    "closing": set(),
    "environment": set(),
    "trackers": set(),
    "timeline": {"metrics"},
    "signals": set(),
    "crash": set(),
    "report": {"metrics", "config_file", "recipes", "timeline"},
    "config_file": set(),
    "attention": {"models", "ops", "tasks"},
    "kernel_lists": {"graph", "ops"},
    "build": {
        *("attention", "environment", "parallel", "generator", "trainer", "graph", "kernel_lists"),
        *("models", "models.init", "tasks", "tokenizer"),
    },
    "startup": {"build", "graph", "kernel_lists", "models", "ops", "parallel"},
    "parity": {"attention", "build", "generator", "graph", "kernel_lists", "models", "ops", "startup", "trainer"},
    "loop": {"rollout", "advantage", "build", "parity", "trainer"},
    "supervised": {"loop", "signals", "startup"},
    "golden": {"models", "ops"},
    "resume": {"checkpoint", "config_file", "metrics", "models"},
    "run_lock": set(),
    "recorder": {
        *("loop", "build", "parallel", "parity", "checkpoint", "metrics", "report", "config_file"),
        *("closing", "display", "environment", "golden", "ops", "resume", "startup", "supervised", "timeline"),
        "trackers",
    },
    "run": {"crash", "recorder", "loop", "build", "parallel", "display", "resume", "signals", "timeline", "trackers"},
    "precompile": {"build", "graph", "startup"},
    "llm": {"attention", "build", "generator", "graph", "kernel_lists", "ops", "startup"},
    "evaluation": {"build", "llm", "rollout", "tasks"},
    "chat": {"llm"},
    "api": {"run", "run_lock", "build", "closing", "config_file", "environment", "parallel"},
    "random_weights": set(),
    "recipes": {"random_weights"},
    "flags": set(),
    "commands": {
        "api",
        "closing",
        "environment",
        "llm",
        "evaluation",
        "chat",
        "report",
        "parity",
        "precompile",
        "models.init",
        "tasks",
        "recipes",
        "flags",
        "config_file",
    },
    "cli": {"api", "commands", "recipes", "flags", "config_file", "display", "environment", "metrics"},
    "__main__": {"cli"},
    # lockstep/__init__.py: the version, which every room may read, and the public names, imported on first use.
    "": {"api", "environment", "evaluation", "llm", "parity", "recipes", "report"},
}

# What only the command line and the tasks may import: everything else works with torch alone.
HEAVY = {"transformers", "tokenizers", "datasets", "tyro", "rich"}
MAY_IMPORT_HEAVY_AT_TOP = {"cli", "commands", "flags", "tasks"}


def room_of(module: str) -> str:
    """The room of a module named relative to the package, such as `models.init`."""
    return module if module in ALLOWED else module.split(".")[0]


def imports(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, module relative to the package) for every import of the package's own modules in `source`."""
    package = ["lockstep", *module.split(".")] if module else ["lockstep"]
    if not is_package:
        package = package[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{stem}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name == "lockstep" or name.startswith("lockstep."):
                yield node.lineno, name.removeprefix("lockstep").removeprefix(".")


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """Imports in `source` that the table does not allow, each as "module:line imports room"."""
    room = room_of(module)
    allowed = ALLOWED[room] | EVERYWHERE | {room}
    found = []
    for line, imported in imports(source, module, is_package):
        target = _target(imported)
        if target and target not in allowed:
            found.append(f"{module}:{line} imports {target}")
    return found


def _target(imported: str) -> str:
    """`ops.linear.linear` is of room `ops`; a name of the package itself (`__version__`) of none."""
    parts = imported.split(".")
    for length in (2, 1):
        if ".".join(parts[:length]) in ALLOWED:
            return ".".join(parts[:length])
    known = {path.stem for path in PACKAGE.iterdir()}
    return parts[0] if parts[0] in known else ""


def modules() -> list[tuple[str, Path]]:
    result = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        result.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return result


def test_every_room_is_in_the_table() -> None:
    assert {room_of(module) for module, _ in modules()} <= ALLOWED.keys()


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda value: value if isinstance(value, str) else "")
def test_imports_point_down(module: str, path: Path) -> None:
    assert not violations(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")


def test_every_entry_of_the_table_is_an_import() -> None:
    found: dict[str, set[str]] = {room: set() for room in ALLOWED}
    for module, path in modules():
        source = path.read_text(encoding="utf-8")
        found[room_of(module)] |= {_target(name) for _, name in imports(source, module, path.name == "__init__.py")}
    assert {room: allowed - found[room] for room, allowed in ALLOWED.items() if allowed - found[room]} == {}


def test_the_table_itself_has_no_cycle() -> None:
    done: set[str] = set()

    def visit(room: str, above: tuple[str, ...]) -> None:
        assert room not in above, f"cycle: {' -> '.join([*above, room])}"
        for lower in ALLOWED[room] - {room}:
            if lower not in done:
                visit(lower, (*above, room))
        done.add(room)

    for room in ALLOWED:
        visit(room, ())


@pytest.mark.parametrize(
    ("module", "source", "target"),
    [
        ("ops.linear", "import lockstep.models", "models"),
        ("ops.linear", "from lockstep import models", "models"),
        ("ops.linear", "from .. import trainer", "trainer"),
        ("generator.engine", "def f():\n    from ..trainer.trainer import Trainer", "trainer"),
        ("trainer.losses", "if TYPE_CHECKING:\n    from ..generator import Engine", "generator"),
        ("graph.capture", "from ..models.decoder import Decoder", "models"),
        ("models.decoder", "from ..tokenizer import load_tokenizer", "tokenizer"),
        ("loop", "from .recipes import RECIPES", "recipes"),
        ("metrics", "from .report import write_report", "report"),
        ("rollout", "from .generator import Engine", "generator"),
        ("models.decoder", "from .init import initialize", "models.init"),
        ("errors", "from .ops import linear", "ops"),
    ],
)
def test_a_planted_import_is_caught(module: str, source: str, target: str) -> None:
    (found,) = violations(source, module)
    assert found.startswith(f"{module}:") and found.endswith(f" imports {target}")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("models.decoder", "from .. import ops\nfrom .attention import Attend\nfrom ..errors import InputError"),
        ("models.init", "from ..tokenizer import load_tokenizer\nfrom .hf import save_model"),
        ("commands", "from . import recipes\nfrom .llm import LLM\nfrom .models.init import init_folder"),
        ("recorder", "import torch\nfrom . import __version__, checkpoint\nfrom .parity import Certificate"),
    ],
)
def test_allowed_imports_pass(module: str, source: str) -> None:
    assert violations(source, module) == []


def test_a_package_resolves_relative_imports_from_itself() -> None:
    assert violations("from .linear import linear", "ops", is_package=True) == []
    assert violations("from ..models import Decoder", "ops", is_package=True) == ["ops:1 imports models"]


def top_level_imports(source: str) -> set[str]:
    """Distributions that importing the module imports (not those under `TYPE_CHECKING` or in functions)."""
    names: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda value: value if isinstance(value, str) else "")
def test_torch_alone_is_enough_to_import(module: str, path: Path) -> None:
    if room_of(module) not in MAY_IMPORT_HEAVY_AT_TOP | {"__main__"}:
        assert top_level_imports(path.read_text(encoding="utf-8")).isdisjoint(HEAVY)


# Files that may name what torch keeps for itself: `torch._x`, `torch.x._y`, and its experimental modules.
PRIVATE = ("graph.compat", "parallel.compat", "ops.operator")
_PRIVATE_NAME = re.compile(r"\b(?:torch\.(?:\w+\.)*|from torch(?:\.\w+)* import )(?:_(?!_)\w+|experimental\b)")


def private_names(source: str) -> list[str]:
    """Where `source` names something private of torch's."""
    return [match[0] for match in _PRIVATE_NAME.finditer(source)]


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda value: value if isinstance(value, str) else "")
def test_private_interfaces_of_torch_are_in_few_files(module: str, path: Path) -> None:
    if not module.startswith(PRIVATE):
        assert private_names(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source", ["import torch._dynamo", "from torch import _C", "torch.fx.experimental.x()", "torch.fx._pytree.y"]
)
def test_a_planted_private_name_is_caught(source: str) -> None:
    assert private_names(source)
    assert not private_names("import torch\nfrom torch.nn import functional\ntorch.__version__")


def test_a_planted_heavy_import_is_caught() -> None:
    assert top_level_imports("import rich.live\ndef f():\n    import tyro") & HEAVY == {"rich"}
