"""The documentation: every command in it runs, at a small size, every example does, and the pages build.

A block of shell or Python under `<!-- not run: REASON -->` is only parsed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import io
import json
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import finished

import lockstep
from lockstep import check_model, evaluate
from lockstep.cli import flags
from lockstep.cli.main import main
from lockstep.cli.resolve import parse
from lockstep.config import RunConfig, other_trainers, recipes, yaml_file
from lockstep.models.init import architecture, init_folder

pytestmark = pytest.mark.usefixtures("shallow_models")
ROOT = Path(lockstep.__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *(DOCS / f"{name}.md" for name in ("index", "first-run", "models", "gpu", "parallel"))]
PAGES += [DOCS / f"{name}.md" for name in ("parity", "resume", "recipes", "generate", "reports", "python", "attention")]
MADE = {"README.md": ("runs/first", "runs/second"), "first-run.md": ("runs/first",), "resume.md": ("runs/second",)}
# What makes other commands small, whatever the page gives.
MEASURED = {
    "eval": {"--prompts": "2", "--max-completion-length": "8"},
    "parity": {"--tokens": "200"},
    "generate": {"--max-completion-length": "8"},
    "chat": {"--max-completion-length": "8"},
}
# What makes a `train` small; a flag that the page gives itself keeps the page's value.
SMALL = {
    "--trainer.prompts-per-step": "2",
    "--sampling.num-generations": "2",
    "--sampling.max-completion-length": "8",
    "--task.validation-prompts": "2",
}


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its code and the comment before it."""

    language: str
    code: str
    note: str

    @property
    def commands(self) -> list[str]:
        """The block's lines that do something."""
        lines = (line.strip() for line in self.code.splitlines())
        return [line for line in lines if line and not line.startswith("#")]


def blocks(page: Path) -> list[Block]:
    found = re.findall(r"(?:<!-- ([^\n]*?) -->\n)?```(\w+)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [Block(language, code, note) for note, language, code in found]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pages take for given: a finished run, a model folder, data and a reward."""
    folder = tmp_path_factory.mktemp("prepared")
    init_folder("tiny", folder / "tiny-model", seed=0)
    rows = [{"prompt": f"{a} + {b} = ", "answer": str(a + b)} for a in range(10) for b in range(10)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sums.py").write_text("def exact(completions, answer, **_):\n    return [1.0 for _ in completions]\n")
    rows = [{"problem": row["prompt"], "answer": row["answer"]} for row in rows]
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copy(folder / "sums.py", folder / "own.py")
    shutil.copy(Path(__file__).parent / "data" / "gsm8k_sample.jsonl", folder / "train.jsonl")
    with contextlib.chdir(folder):
        assert main(small(["train", "--run-dir", "runs/first", "--checkpoint.interval", "1"])) == 0
        assert main(small(["train", "--run-dir", "runs/second", "--checkpoint.interval", "1", "--seed", "5"])) == 0
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(prepared, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(recipes, "sum_digits", lambda model: small_config(model))
    monkeypatch.setattr(lockstep, "evaluate", lambda config, **given: evaluate(small_evaluation(config), **given))
    monkeypatch.setattr(lockstep, "check_model", lambda model, **given: check_model(model, **given | {"tokens": 200}))
    return tmp_path / "work"


def small_config(model: str | None) -> RunConfig:
    config = recipes.RECIPES["sum-digits"](model)
    few = dataclasses.replace(
        config.trainer, prompts_per_step=2, warmup_steps=2, warmup_batch_size=4, max_idle_steps=100
    )
    return dataclasses.replace(
        config, steps=3, trainer=few, task=dataclasses.replace(config.task, validation_prompts=2)
    )


def small_evaluation(config: RunConfig) -> RunConfig:
    few, brief = {"validation_prompts": 2}, {"max_completion_length": 8}
    return dataclasses.replace(
        config, task=dataclasses.replace(config.task, **few), sampling=dataclasses.replace(config.sampling, **brief)
    )


def small(arguments: list[str]) -> list[str]:
    """A command of the page, at a size that takes a second."""
    arguments = [argument.replace("Qwen/Qwen3-0.6B", "tiny-model") for argument in arguments]
    for flag, value in MEASURED.get(arguments[0], {}).items():
        if flag in arguments:
            arguments[arguments.index(flag) + 1] = value
        else:
            arguments += [flag, value]
    if arguments[0] == "precompile":
        return [*arguments, *(text for flag in {**SMALL, "--arch": "tiny-llama"}.items() for text in flag)]
    if arguments[0] != "train" or "--help" in arguments:
        return arguments
    steps = "3" if "--resume" in arguments else "2"
    if "--steps" in arguments:
        arguments[arguments.index("--steps") + 1] = steps
    elif "--resume" not in arguments:
        arguments += ["--steps", steps]
    if "--resume" in arguments:
        return arguments
    of_hub = {"gsm8k", "dataset"} & set(arguments)
    extra = {"--model": "tiny-model"} if of_hub else {}
    if not of_hub and "--config" not in arguments:
        extra = {"--trainer.warmup-steps": "2", "--trainer.warmup-batch-size": "4"}
    for flag, value in (SMALL | extra).items():
        arguments += [] if flag in arguments else [flag, value]
    return arguments


def run(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a line of shell: `lockstep ...`, `python FILE`, or a `printf` into a `lockstep`."""
    before, _, command = line.rpartition(" | ")
    if before:
        typed = finished(["sh", "-c", before], check=True).stdout
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    words = shlex.split(command, comments=True)
    if words[0] == "python":
        runpy.run_path(words[1], run_name="__main__")
        return
    assert words[0] == "lockstep", f"the test cannot run {line!r}; say why under <!-- not run: REASON -->"
    if words[1] in MEASURED:
        assert not isinstance(parse(words[1:]), int), "what is made small is a value that it takes"
    assert main(small(words[1:])) == 0, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_and_example_runs(
    page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for run_dir in MADE.get(page.name, ()):
        shutil.rmtree(folder / run_dir)
    monkeypatch.syspath_prepend(str(folder))
    for block in blocks(page):
        if block.language == "python" and block.note.startswith("run: "):
            name = block.note.removeprefix("run: ")
            (folder / name).write_text(block.code)
            if "if __name__" in block.code or "lockstep" in block.code:
                runpy.run_path(name, run_name="__main__")
        elif block.language == "sh" and not block.note.startswith("not run: "):
            for line in block.commands:
                run(line, monkeypatch)
        elif block.language == "python":
            compile(block.code, page.name, "exec")


NOT_RUN = [
    (page.name, line)
    for page in [*PAGES, *sorted(DOCS.glob("*.md"))]
    for block in blocks(page)
    if block.language == "sh" and (block.note.startswith("not run: ") or page not in PAGES)
    for line in block.commands
    if line.startswith("lockstep ")
]


@pytest.mark.parametrize(("page", "line"), sorted(set(NOT_RUN)))
def test_commands_that_are_not_run_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str, line: str) -> None:
    monkeypatch.chdir(tmp_path)
    done = SimpleNamespace(identical=True, render=str, to_dict=dict)
    fakes = {
        "run.train": SimpleNamespace(train=lambda *_: {}),
        "session.precompile": SimpleNamespace(precompile=lambda *_: {}, render=str),
        "session.parity_check": SimpleNamespace(check_model=lambda *_: done),
        "models.init": SimpleNamespace(init_folder=lambda *_: {}, architecture=architecture),
        "run.evaluate": SimpleNamespace(evaluate=lambda *_, **__: {}),
        "session.evaluation": SimpleNamespace(render=str),
        "serve.server": SimpleNamespace(serve=lambda *_: None),
    }
    importlib.import_module("lockstep.session.build")  # which imports some of what the fakes stand for
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, f"lockstep.{name}", fake)
    words = shlex.split(line, comments=True)[1:]
    for flag in ("--resume", "--config"):
        if flag in words:
            run_dir = Path(words[words.index(flag) + 1].removesuffix("/config.yaml"))
            run_dir.mkdir(parents=True, exist_ok=True)
            yaml_file.save(RunConfig(), run_dir / "config.yaml")
    assert main(words) == 0


def test_flags_that_pages_name_exist() -> None:
    kinds = [kind for kind in vars(flags).values() if getattr(kind, "__module__", "") == flags.__name__]
    commands = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
    known = {flag for kind in commands for flag in flags.list_flags(kind)} | {"--data", "--reward", "--help"}
    of_benchmarks = {"--ranks-share-gpu", "--skip-done", "--updates"}
    for page in PAGES[:1] + [page for page in DOCS.glob("*.md") if page.name != "LOG.md"]:
        text = re.sub("```.*?```", "", page.read_text(), flags=re.DOTALL)
        named = {flag for flag in re.findall("`(--[a-z][a-z.0-9-]+)", text) if not flag.endswith(".")}
        assert named <= known | of_benchmarks, page.name
    assert set(other_trainers.EQUIVALENT_FLAGS.values()) <= known


def test_the_readme_shows_every_command() -> None:
    shown = set(re.findall(r"(?:^|\| )lockstep (\w+)", PAGES[0].read_text(), re.MULTILINE))
    assert shown >= {"train", "precompile", "plan", "generate", "chat", "serve", "eval", "parity", "report", "init"}


def test_the_names_of_the_python_page_have_their_parameters() -> None:
    shown = re.findall(r"`(\w+)\(([\w, *]+)\)`", (DOCS / "python.md").read_text().partition("## Names")[2])
    assert {name for name, _ in shown} == {
        "train",
        "LLM",
        "evaluate",
        "check_model",
        "write_report",
        "write_comparison",
    }
    for name, parameters in shown:
        assert parameters.replace("*, ", "").split(", ") == list(inspect.signature(getattr(lockstep, name)).parameters)


@pytest.fixture(scope="module")
def reference() -> Iterator[SimpleNamespace]:
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module


def test_the_reference_has_every_flag_with_a_meaning(reference: SimpleNamespace) -> None:
    rows = [line.split(" | ") for line in reference.page().splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`([^`]+)`", row[0])}
    for name, default in yaml_file.flatten(RunConfig()).items():
        if name != "recipe":
            section, _, field = name.rpartition(".")
            flag = f"--{name}".replace("_", "-")
            opposite = f"--{section}.no-{field}".replace("_", "-")
            assert flag in documented and (not isinstance(default, bool) or opposite in documented), name
    assert {"RECIPE", "--data", "--reward", "--resume", "--pass-threshold", "RUN_DIR", "ARCH"} <= documented
    assert all(row[-1].strip(" |") for row in rows)


def test_the_reference_follows_the_source(reference: SimpleNamespace) -> None:
    @dataclasses.dataclass(frozen=True)
    class Made:
        several: tuple[int, ...] = (1, 2)
        """What `a|b`
        means."""
        switch: bool = True
        """On."""

    assert reference._table(Made, "part.").splitlines()[2:] == [
        "| `--part.several` | whole number ... | `(1, 2)` | What `a\\|b` means. |",
        "| `--part.switch`, `--part.no-switch` |  | `true` | On. |",
    ]
    commands = {
        kind for kind in vars(flags).values() if dataclasses.is_dataclass(kind) and kind.__module__ == flags.__name__
    }
    assert {c for c in commands if not c.__name__.startswith("_")} == {
        *reference.COMMANDS,
        flags.Train,
        flags.Precompile,
        flags.Plan,
    }


def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = finished(command, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--sampling.top-p" in (tmp_path / "site" / "reference" / "index.html").read_text()


def test_images_are_there_and_small() -> None:
    for page in DOCS.glob("*.md"):
        for name in re.findall(r"!\[.*?\]\((.*?)\)", page.read_text()):
            assert (DOCS / name).stat().st_size < 300_000


def test_the_reference_shows_what_each_recipe_sets(reference: SimpleNamespace) -> None:
    rows = {row[0]: row[1:] for row in (line[2:].split(" | ") for line in reference.recipes_table().splitlines())}
    assert rows["setting"] == ["default", "sum-digits", "word-arithmetic", "gsm8k", "dataset |"]
    assert rows["steps"] == ["`10`", "`120`", "`300`", "`200`", "`100` |"]
    assert rows["task.easy"] == ["`false`", "`true`", "", "", " |"] and "seed" not in rows
