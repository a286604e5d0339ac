"""Imports point down only: the package's import graph, as tables, checked against the source; and the size of folders.

An import counts wherever it stands: at the top, in a function, or under `TYPE_CHECKING`.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import mutants
import pytest

import lockstep

PACKAGE = Path(lockstep.__file__).parent

EVERYWHERE = {"types", "config", "errors", "json_file", "timings", "user_functions"}

# room: the rooms it may import, besides itself and EVERYWHERE. A room is a folder or a module at the top.
ALLOWED: dict[str, set[str]] = {
    "types": set(),
    "config": set(),
    "errors": set(),
    "json_file": set(),
    "timings": set(),
    "user_functions": set(),
    "cache": set(),
    "machine": set(),
    "distributed": {"machine", "ops"},
    "algorithms": {"ops"},
    "ops": {"cache"},
    "models": {"cache", "distributed", "ops"},
    "graph": {"cache", "distributed", "ops"},
    "generator": {"graph", "models", "ops"},
    "trainer": {"algorithms", "distributed", "graph", "machine", "models", "ops"},
    "environments": {"distributed", "machine"},
    "session": {
        "algorithms",
        "cache",
        "distributed",
        "environments",
        "generator",
        "graph",
        "machine",
        "models",
        "ops",
        "trainer",
    },
    "rl": {"algorithms", "environments", "session", "trainer"},
    "serve": {"environments", "generator", "machine", "models", "session"},
    "run": {"cache", "distributed", "machine", "models", "rl", "serve", "session"},
    "api": {"machine", "run", "session"},
    "cli": {"api", "environments", "machine", "models", "run", "serve", "session"},
    "__main__": {"cli"},
    # lockstep/__init__.py: the version, which every room may read, and the public names, imported on first use.
    "": {"api", "cache", "machine", "run", "session"},
}

# Within a room, from the lowest floor up: modules and folders, relative to the room; "." is its `__init__.py`. A module
# imports what lies on lower floors, and what its own entry holds. The longest entry that fits a module is its own.
FLOORS: dict[str, tuple[str, ...]] = {
    "config": (
        "algorithms other_trainers random_weights sections.section",
        "sections",
        "run",
        ".",
        "recipes yaml_file",
    ),
    "algorithms": (
        "advantage host_calls policy_terms",
        "algorithm",
        "cispo distillation grpo sapo sft user",
        "dapo dppo dr_grpo gspo ppo reinforce_pp rloo",
        ".",
    ),
    "cache": ("file_hashes loaded_code tensor_file user_folder", "fingerprint", "tokenizers"),
    "distributed": (
        "cells mesh torch_private watchdog",
        "push",
        "collectives placement ranks",
        "join parameter_parts spread",
        ".",
    ),
    "ops": (
        "compile_processes native.library pdl records rows",
        "precompile triton_peers",
        "logprobs.philox operator",
        "logprobs.reference",
        "native",
        "activation adamw decode_update embedding fold gradient_norm norm sequence",
        "linear rope",
        "attention",
        "fused logprobs mla moe",
        "machine_check",
        ".",
    ),
    "models": (
        "blocks.attention blocks.mxfp4 blocks.rope tokenizer",
        "config",
        "blocks",
        "families.family",
        "families",
        "decoder hf.config hf.weight_map",
        "checks parts",
        "hf.stored_tensors",
        "hf patterns",
        ". init",
    ),
    "graph": (
        "ir.sizes",
        "torch_private",
        "ir",
        "capture launch store",
        "passes",
        "capture.joint store.key",
        "builder warm_up",
        "program",
        "runtime",
        "check parallel_build",
        "report",
        ".",
    ),
    "generator": (
        "cache_capacity kv_cache request weights",
        "forward running_batch",
        "scheduler",
        "prefill_batch",
        "check_cases sizes",
        "runner",
        "engine",
        ".",
    ),
    "trainer": (
        "parameters routing shapes",
        "gathered optimizer packing",
        "step",
        "mismatches programs",
        "check_cases result",
        "trainer",
        ".",
    ),
    "environments": (
        "rewards sandbox",
        "base calls environment",
        "codec",
        "episodes remote tools",
        "adapters ranks",
        "collect data tasks worked_examples",
        "loading",
        ".",
    ),
    "session": (
        "attention certificate golden kernel_lists memory signals text",
        "build",
        "degree processes warm_up",
        "generate parity_check precompile",
        "evaluation",
    ),
    "rl": ("batching dynamic_sampling step_checks step_metrics token_advantages", "loop", "resample sft_warmup"),
    "run": (
        "checkpoint.retention metrics",
        "checkpoint.files",
        "checkpoint.saver",
        "checkpoint closing_lines crash display lock",
        "faults resume timeline trackers",
        "report",
        "recorder",
        "evaluate replay train",
    ),
    "serve": (
        "batcher errors metrics settings",
        "bodies text ticket",
        "chat_prompt",
        "service",
        "events",
        "routes.common",
        "routes",
        "app",
        "server",
        "rollouts",
    ),
    "cli": ("chat flags", "commands", "resolve", "main"),
}

MOST_FILES, MOST_AT_THE_TOP = 12, 8  # of a folder, without `__init__.py`
CATALOGUES = {"algorithms": 24, "models/families": 24, "environments/tasks": 24}
# Arguments of a function, `self` apart, outside Triton bodies; and which have more: public ones, which are promises, a
# trainer's, and what Inductor compiles of a user's mask. One that has fewer by now is not to be listed.
MOST_ARGUMENTS = 6
LONG_SIGNATURES = {
    "api.train",
    "distributed.push.operator.push_attention_decode",
    "distributed.push.triton_products.push_attention_decode",
    "ops.attention.operator.attention_decode",
    "ops.attention.triton_decode.attention_decode",
    "ops.attention.triton_flex._make_attend.attend",
    "api.evaluate",
    "session.generate.LLM.__init__",
    "session.parity_check.check_model",
    "trainer.trainer.Trainer.__init__",
}
# Folders of tests that are no room's: of what needs a GPU, data, odd inputs through the command line, plug-ins.
NO_ROOM = {"gpu", "data", "odd_inputs", "extend"}
MOST_ROOMS, MOST_FLOORS, MOST_ARROWS = 26, 12, 120

# What only the command line and data may import: everything else works with torch alone.
HEAVY = {"transformers", "tokenizers", "datasets", "tyro", "rich"}
MAY_IMPORT_HEAVY_AT_TOP = {"cli", "environments", "__main__"}


def room_of(module: str) -> str:
    """The room of a module named relative to the package, such as `models.init`."""
    return module.split(".")[0]


@cache
def tree_of(source: str) -> ast.Module:
    """`source`, which several tests read, parsed once."""
    return ast.parse(source)


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """All of its nodes, walked once."""
    return tuple(ast.walk(tree_of(source)))


def imports(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, module relative to the package) for every import of the package's own modules in `source`."""
    package = ["lockstep", *module.split(".")] if module else ["lockstep"]
    if not is_package:
        package = package[:-1]
    for node in nodes(source):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{stem}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.keyword) and node.arg in ("cuda", "fake") and isinstance(node.value, ast.Constant):
            path = str(node.value.value).partition(":")[0]  # an operator's, imported by name; a dot is a folder up
            beside = package[: len(package) - path.count(".", 0, len(path) - len(path.lstrip(".")))]
            names = [".".join([*beside, path.lstrip(".")])]
        else:
            continue
        for name in names:
            if name == "lockstep" or name.startswith("lockstep."):
                yield node.lineno, name.removeprefix("lockstep").removeprefix(".")


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """Imports in `source` that the tables do not allow, each as "module:line imports room or module"."""
    room = room_of(module)
    allowed = ALLOWED[room] | EVERYWHERE | {room}
    found = []
    for line, imported in imports(source, module, is_package):
        target = _target(imported)
        if target and target not in allowed:
            found.append(f"{module}:{line} imports {target}")
        elif target == room and (inner := _within(imported)) is not None and not _lies_below(inner, module):
            found.append(f"{module}:{line} imports {inner}")
    return found


def _target(imported: str) -> str:
    """`ops.linear.operator` is of room `ops`; a name of the package itself (`__version__`) of none."""
    first = imported.split(".")[0]
    return first if first in ALLOWED else ""


@cache
def _modules_by_name() -> dict[str, Path]:
    return dict(modules())


def _within(imported: str) -> str | None:
    """The module that an import from within the package reaches: `ops.linear.operator` for a name of it."""
    parts = imported.split(".")
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in _modules_by_name():
            return ".".join(parts[:length])
    return None


def entry_of(module: str) -> tuple[str, int] | None:
    """The entry of FLOORS that a module has, and its floor from below; None in a room without floors."""
    room, _, inner = module.partition(".")
    entries = {entry: floor for floor, line in enumerate(FLOORS.get(room, ())) for entry in line.split()}
    parts = inner.split(".") if inner else ["."]
    for length in range(len(parts), 0, -1):
        if (entry := ".".join(parts[:length])) in entries:
            return entry, entries[entry]
    return None


def _lies_below(imported: str, module: str) -> bool:
    above, below = entry_of(module), entry_of(imported)
    if above is None or below is None:
        return True
    return below[0] == above[0] or below[1] < above[1]


def modules() -> list[tuple[str, Path]]:
    result = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        result.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return result


def test_every_room_is_in_the_table() -> None:
    assert {room_of(module) for module, _ in modules()} == ALLOWED.keys()


def test_every_module_of_a_room_with_floors_has_one() -> None:
    assert [
        m for m, path in modules() if room_of(m) in FLOORS and path.name != "__init__.py" and entry_of(m) is None
    ] == []


def test_every_entry_of_the_floors_is_one_of_a_module() -> None:
    used = {(room_of(m), entry[0]) for m, _ in modules() if (entry := entry_of(m))}
    assert {(room, entry) for room, floors in FLOORS.items() for line in floors for entry in line.split()} == used


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
        ("ops.linear.operator", "import lockstep.models", "models"),
        ("ops.linear.operator", "from lockstep import models", "models"),
        ("ops.operator", "from .. import trainer", "trainer"),
        ("generator.engine", "def f():\n    from ..trainer.trainer import Trainer", "trainer"),
        ("algorithms.policy_terms", "if TYPE_CHECKING:\n    from ..generator import Engine", "generator"),
        ("graph.capture.step", "from ...models.decoder import Decoder", "models"),
        ("models.decoder", "from ..session.build import build", "session"),
        ("rl.loop", "from ..run.metrics import write_all", "run"),
        ("environments.collect", "from ..generator import Engine", "generator"),
        ("models.decoder", "from .init import initialize", "models.init"),
        ("errors", "from .ops import linear", "ops"),
        ("graph.ir.verify", "from ..runtime import Runtime", "graph.runtime"),
        ("graph.passes.fuse", "def f():\n    from ..check.bisect import first_difference", "graph.check.bisect"),
        ("graph.torch_private.trace", "from ..ir.captured import Captured", "graph.ir.captured"),
        ("graph.launch.launcher", "from .. import Program", "graph"),
        ("ops.norm.triton", "from ..attention import operator", "ops.attention.operator"),
        ("ops.attention.operator", "operator('lockstep::x', cuda='.mla.triton:x')", "ops.mla.triton"),
        ("ops.rope.operator", "operator('lockstep::x', fake='.attention.flex:x')", "ops.attention.flex"),
        ("ops.native.library", "from . import rms_norm", "ops.native"),
        ("ops.attention.operator", "from ..mla.operator import mla_packed", "ops.mla.operator"),
        ("trainer.step", "from .programs import Inputs", "trainer.programs"),
        ("trainer.parameters", "from .optimizer import AdamW", "trainer.optimizer"),
        ("run.metrics", "from .report import write_report", "run.report"),
    ],
)
def test_a_planted_import_is_caught(module: str, source: str, target: str) -> None:
    (found,) = violations(source, module)
    assert found.startswith(f"{module}:") and found.endswith(f" imports {target}")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("models.decoder", "from .. import ops\nfrom .blocks.attention import Attend\nfrom ..errors import InputError"),
        ("models.init", "from .tokenizer import load_tokenizer\nfrom .hf.export import save_model"),
        ("cli.commands", "from ..config import recipes\nfrom ..session.generate import LLM\nfrom . import chat"),
        ("run.recorder", "import torch\nfrom .. import __version__\nfrom . import checkpoint"),
        ("ops.attention.triton_backward", "from .triton_tiles import block\nfrom ..rows import unit_inner"),
    ],
)
def test_allowed_imports_pass(module: str, source: str) -> None:
    assert violations(source, module) == []


def test_a_package_resolves_relative_imports_from_itself() -> None:
    assert violations("from .linear.operator import linear", "ops", is_package=True) == []
    assert violations("from ..models import Decoder", "ops", is_package=True) == ["ops:1 imports models"]


# ---- what a folder holds, and what the whole looks like ----


def test_folders_are_small() -> None:
    count = Counter(path.parent for _, path in modules() if path.name != "__init__.py")
    files = {folder.relative_to(PACKAGE).as_posix(): number for folder, number in count.items()}
    assert {f: n for f, n in files.items() if n > CATALOGUES.get(f, MOST_FILES)} == {}
    assert files["."] <= MOST_AT_THE_TOP and files.keys() >= CATALOGUES.keys()


def test_a_class_name_stands_once() -> None:
    sources = [path.read_text(encoding="utf-8") for _, path in modules()]
    names = Counter(node.name for source in sources for node in nodes(source) if isinstance(node, ast.ClassDef))
    assert [name for name, number in names.items() if number > 1] == []


def arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many it has, `self` apart; a Triton body's, which has a pointer and strides a tensor, are not counted."""
    if any("jit" in ast.unparse(decorator) for decorator in function.decorator_list):
        return 0
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def signatures(module: str, node: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, arguments) of each function in a module, methods by their class."""
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        name = f"{module}.{child.name}" if named else module
        if named and not isinstance(child, ast.ClassDef):
            yield name, arguments(child)
        yield from signatures(name, child)


def test_signatures_are_short() -> None:
    all_of_them = [found for m, path in modules() for found in signatures(m, tree_of(path.read_text(encoding="utf-8")))]
    assert {name for name, count in all_of_them if count > MOST_ARGUMENTS} == LONG_SIGNATURES


@pytest.mark.parametrize(
    ("source", "count"),
    [("def f(self, a, /, b=1, *c, d, **e): ...", 3), ("def f(a, self): ...", 2), ("@triton.jit\ndef f(a): ...", 0)],
)
def test_arguments_are_counted(source: str, count: int) -> None:
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef) and arguments(function) == count


def test_folders_of_tests_are_rooms() -> None:
    tests = Path(__file__).parent
    folders = {path.parent.relative_to(tests).as_posix() for path in tests.rglob("test_*.py")} - {"."}
    assert {f for f in folders if not (PACKAGE / f).is_dir() and f.partition("/")[0] not in NO_ROOM} == set()
    tops = {path.stem.removeprefix("test_") for path in tests.glob("test_*.py")}
    assert tops - {"layering", "wheel", "docs", "benchmarks"} <= ALLOWED.keys(), (
        "a module's at the top, or of the whole"
    )


def test_planted_edits_follow_what_they_are_planted_in() -> None:
    root = Path(__file__).parents[1]
    stale = [edit.name for edit in mutants.mutants() if (root / edit.file).read_text("utf-8").count(edit.old) != 1]
    gone = [test for edit in mutants.mutants() for test in edit.tests if not _is_there(root, *test.split("::"))]
    assert (stale, gone) == ([], [])


def _is_there(root: Path, path: str, test: str = "") -> bool:
    file, name = root / path, test.partition("[")[0]
    return file.exists() and (not test or f"def {name}(" in file.read_text("utf-8"))


def arrows() -> set[tuple[str, str]]:
    """(room, room that it imports), of rooms that are folders, or modules at the top."""
    found = set()
    for module, path in modules():
        for _, name in imports(path.read_text(encoding="utf-8"), module, path.name == "__init__.py"):
            if (target := _target(name)) and target != room_of(module):
                found.add((room_of(module), target))
    return found


def height(room: str, found: set[tuple[str, str]]) -> int:
    """Floors up to this room's; there is no circle (`test_the_table_itself_has_no_cycle`)."""
    return 1 + max((height(below, found) for above, below in found if above == room), default=0)


def test_the_house_is_low() -> None:
    found = arrows()
    assert len(ALLOWED) <= MOST_ROOMS and len(found) <= MOST_ARROWS
    assert max(height(room, found) for room in ALLOWED) <= MOST_FLOORS


def top_level_imports(source: str) -> set[str]:
    """Distributions that importing the module imports (not those under `TYPE_CHECKING` or in functions)."""
    names: set[str] = set()
    for node in tree_of(source).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda value: value if isinstance(value, str) else "")
def test_torch_alone_is_enough_to_import(module: str, path: Path) -> None:
    if room_of(module) not in MAY_IMPORT_HEAVY_AT_TOP:
        assert top_level_imports(path.read_text(encoding="utf-8")).isdisjoint(HEAVY)


# Files that may name what torch keeps for itself: `torch._x`, `torch.x._y`, and its experimental modules.
PRIVATE = ("graph.torch_private.", "distributed.torch_private", "ops.operator")
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


def loops_over_texts(source: str) -> list[int]:
    """Lines of loops over a set of texts: their order is another in each process, and ranks must call alike."""
    over = [n.iter for n in nodes(source) if isinstance(n, ast.For | ast.comprehension)]
    parts = [(loop, p) for loop in over for p in ([loop.left, loop.right] if isinstance(loop, ast.BinOp) else [loop])]
    sets = [(loop, p.elts) for loop, p in parts if isinstance(p, ast.Set)]
    return [loop.lineno for loop, of in sets if any(isinstance(getattr(e, "value", None), str) for e in of)]


def test_no_loop_goes_over_a_set_of_texts() -> None:
    assert loops_over_texts('for name in {"a", "b"} & known.keys():\n    pass\nx = [n for n in {"a"}]') == [1, 3]
    assert {m: found for m, p in modules() if (found := loops_over_texts(p.read_text(encoding="utf-8")))} == {}


def test_a_familys_name_stands_in_its_file_alone() -> None:
    families = PACKAGE / "models" / "families"
    names = {path.stem for path in families.glob("*.py")} - {"__init__", "family"}
    assert len(names) >= 4
    for _, path in modules():
        if path.is_relative_to(families):
            continue
        found = nodes(path.read_text(encoding="utf-8"))
        strings = {node.value for node in found if isinstance(node, ast.Constant)}
        imported = {alias.name for node in found if isinstance(node, ast.ImportFrom) for alias in node.names}
        assert not names & (strings | imported), path
