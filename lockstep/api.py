"""Training from Python, and what it shares with the command line: run folders and resuming."""

from __future__ import annotations

import ast
import contextlib
import filecmp
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from . import machine
from .config import RunConfig, require_config, validate, yaml_file
from .config.yaml_file import ROWS_FILE
from .errors import InputError, refuse
from .run import lock as run_lock
from .run.closing_lines import describe_interrupted_run, relative_to_cwd

Rows = str | Path | Iterable[Mapping[str, Any]]

_log = logging.getLogger("lockstep")


def train(
    config: RunConfig,
    run_dir: str | Path | None = None,
    *,
    data: Rows | None = None,
    validation_data: Rows | None = None,
    resume: bool = False,
    resume_with_other_numerics: bool = False,
    rewards: Callable[..., Any] | Sequence[Callable[..., Any]] = (),
    environment: Callable[[], Any] | None = None,
    tools: Callable[..., Any] | Sequence[Callable[..., Any]] = (),
    trackers: Callable[..., Any] | Sequence[Callable[..., Any]] = (),
) -> dict[str, Any]:
    """Train and return the summary, with the run folder as `run_dir`; the same as `lockstep train`.

    Args:
        config: a recipe's configuration (`lockstep.recipes`), changed with `dataclasses.replace`.
        run_dir: folder for everything the run writes, new or empty; None makes one under `runs/`.
        data: rows to train on, such as a `datasets.Dataset` or a list of dicts, saved in the run folder as
            `data.jsonl`; or a path or hub id. Replaces `config.task.data`.
        validation_data: the same for `config.task.validation_data`, saved as `validation_data.jsonl`.
        resume: continue the run in `run_dir`, from a checkpoint (saved only if `checkpoint.interval` is above 0). The
            configuration must be that of the run, except for `steps` and what no step depends on (`checkpoint`,
            `metrics`), and rows must be those that it began with.
        resume_with_other_numerics: continue even if the arithmetic is no longer bitwise that of the run's beginning;
            the certificate says so.
        rewards: one or several reward functions, defined at the top level of a module or script; replaces
            `config.task.reward`.
        environment: an `Environment`, or TRL's `environment_factory`, defined likewise; replaces
            `config.task.environment`.
        tools: one or several functions that the model may call, defined likewise; replaces `config.task.tools`.
        trackers: one or several functions, defined likewise, that the first process calls with each step's number and
            a dictionary of its metrics that are numbers; beside those of `config.metrics.trackers`.

    Raises:
        InputError: an argument cannot be used.
        LockstepError: the run failed (`ParityError`, `NonFiniteError`); what it wrote until then stays.

    Under `torchrun` every process calls this with the same arguments, and returns the summary.
    """
    require_config(config)
    paths: dict[str, str] = {}
    rows: dict[str, Iterable[Mapping[str, Any]]] = {}
    for name, source in (("data", data), ("validation_data", validation_data)):
        if isinstance(source, (str, Path)):
            paths[name] = str(source)
        elif source is not None:
            rows[name], paths[name] = source, ROWS_FILE.format(name)  # a path once there is a folder
    config = _with_functions(config, rewards, environment, tools)
    config = replace(config, task=replace(config.task, **paths))  # type: ignore[arg-type]
    if functions := _as_functions("trackers", trackers):
        own = tuple(_name_function("tracker", function) for function in functions)
        config = replace(config, metrics=replace(config.metrics, trackers=config.metrics.trackers + own))
    config = validate(yaml_file.check_types(config))
    given_dir = None if run_dir is None else Path(os.path.expanduser(run_dir))
    if resume and given_dir is None:
        raise InputError("run_dir is missing: name the folder of the run to resume")
    if resume_with_other_numerics and not resume:
        raise InputError("--resume-with-other-numerics has no effect without --resume; remove it")
    # Later phases are shown by the run's display.
    with machine.report_if_slow("importing torch"), machine.pause_gc_for_imports():
        from .run.train import train as run
        from .session.processes import join_processes
        from .session.signals import raise_on_signals
    explained = _explaining_paths(given_dir, config) if resume and given_dir is not None else contextlib.nullcontext()
    flags = {"resume": resume, "resume_with_other_numerics": resume_with_other_numerics}
    with explained, join_processes(config, **flags) as world, contextlib.ExitStack() as lock:
        lock.enter_context(raise_on_signals())
        if resume and given_dir is not None:
            from .run.resume import require_unchanged_config

            folder = given_dir
            config = _with_rows_in(folder, config, rows)
            world.gather_results(lambda: require_unchanged_config(folder, load_run_config(folder), config, world.size))
            world.broadcast_from_first(lambda: lock.enter_context(run_lock.lock_run_folder(folder)))
        else:
            folder = world.broadcast_from_first(lambda: _claim_folder(given_dir, config.recipe, lock))
            config = _with_rows_in(folder, config, rows)
        if world.is_first:
            print(f"run folder: {folder}", file=sys.stderr, flush=True)
        try:
            world.broadcast_from_first(lambda: _write_rows(rows, folder))
            return {"run_dir": str(folder)} | run(config, folder, resume, world, resume_with_other_numerics)
        except BaseException as error:
            if world.is_first:
                lock.close()
                with contextlib.suppress(OSError):
                    if {path.name for path in folder.iterdir()} <= {ROWS_FILE.format(name) for name in rows}:
                        shutil.rmtree(folder)  # it holds nothing but the given rows
                if isinstance(error, KeyboardInterrupt) and folder.exists():
                    error.add_note(describe_interrupted_run(folder, world.size))
            raise


def evaluate(
    config: RunConfig,
    *,
    data: Rows | None = None,
    rewards: Callable[..., Any] | Sequence[Callable[..., Any]] = (),
    environment: Callable[[], Any] | None = None,
    tools: Callable[..., Any] | Sequence[Callable[..., Any]] = (),
    n: int = 1,
    k: int | Sequence[int] = (),
    temperature: float | None = None,
    pass_reward: str | None = None,
    pass_threshold: float = 1.0,
    progress: IO[str] | None = None,
) -> dict[str, Any]:
    """Complete each of the task's validation problems `n` times and score the completions; the same as `lockstep eval`.

    Args:
        config: supplies the model, task (`validation_data`, `validation_prompts`, `reward`), sampling, seed, device,
            dtype and `compile`, except what affects only the trainer's graphs.
        data: rows to evaluate on, all of them, such as a `datasets.Dataset` or a list of dicts; or a path or hub id,
            of which `config.task.validation_prompts` rows are taken. Replaces `config.task.data` and `validation_data`.
        rewards, environment, tools: as for `train`.
        k: which pass@k to estimate, each at most `n`; empty for the powers of two up to `n`.
        temperature: None for 0 (greedy) if `n` is 1, else for `config.sampling.temperature`.
        pass_reward: name of the reward function that decides whether a completion passes; None for the task's first.
        pass_threshold: a completion passes if that function's value is at least this.
        progress: where to report progress, for example `sys.stderr`.

    Returns a dict: `reward/mean` and `pass@K`, each with its 95 % interval under `.../ci95`, the mean of each reward
    function, lengths, and `per_problem` counts, each with the problem's number, from 0 and without rows that
    `config.task.filter_overlong_prompts` left out. A problem with a completion whose `pass_reward` is None does not
    count for pass@k and has `passed` None; `pass_unknown` lists each k for which no problem has k scored completions.
    Under `torchrun` all processes call this with the same arguments; problems are dealt to groups of
    `config.parallel.generator_tp` processes, and each process returns the result for all problems.

    Raises `InputError` for settings that cannot work and for a task without validation problems, and `NonFiniteError`
    if a log-probability is not finite.
    """
    require_config(config)
    config = _with_functions(config, rewards, environment, tools)
    with contextlib.ExitStack() as stack:
        if isinstance(data, (str, Path)):
            config = replace(config, task=replace(config.task, data=str(data), validation_data=str(data)))
        elif data is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            count = _write_rows({"data": data}, folder)["data"]
            refuse(count == 0, "data has no rows")
            path = str(folder / ROWS_FILE.format("data"))
            stack.enter_context(_name_rows_in_errors(path))
            task = replace(config.task, data=path, validation_data=path, validation_prompts=count)
            config = replace(config, task=task)
        from .run.evaluate import evaluate as run

        return run(
            config,
            n=n,
            k=tuple(k) if isinstance(k, Iterable) else (k,),
            temperature=temperature,
            pass_reward=pass_reward,
            pass_threshold=pass_threshold,
            progress=progress,
        )


def _with_functions(config: RunConfig, rewards: Any, environment: Any, tools: Any) -> RunConfig:
    """The configuration with the names of the functions given; what is not given stays."""
    given: dict[str, Any] = {}
    if functions := _as_functions("rewards", rewards):
        given["reward"] = tuple(_name_function("reward", function) for function in functions)
    if environment is not None:
        given["environment"] = _name_function("environment", environment)
    if functions := _as_functions("tools", tools):
        given["tools"] = tuple(_name_function("tool", tool) for tool in functions)
    return replace(config, task=replace(config.task, **given))


def _as_functions(argument: str, given: Any) -> list[Callable[..., Any]]:
    """The functions given, one or several, as a list."""
    if callable(given):
        return [given]
    functions = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    for function in functions:
        if not callable(function):
            field = {"rewards": "task.reward", "trackers": "metrics.trackers"}.get(argument, f"task.{argument}")
            hint = f" (names go into config's {field})" if isinstance(function, str) else ""
            raise InputError(f"{argument}: {function!r:.100} is no function; give one, or a list of them{hint}")
    return functions


def _name_function(kind: str, function: Callable[..., Any]) -> str:
    """How config.yaml names `function`, so that other processes find it: by module or script file, and name."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if getattr(sys.modules.get(module), name, None) is not function:
        # The script may have another name for it: it may be what a function made, or an object.
        names = [known for known, value in vars(sys.modules["__main__"]).items() if value is function]
        if not names:
            raise InputError(
                f"{kind} {name or repr(function)} cannot be named in config.yaml; define it with `def` or `class`, or "
                "give it a name, at the top level of a module or script"
            )
        module, name = "__main__", names[0]
    if module != "__main__":
        return f"{module}:{name}"
    script = Path(getattr(sys.modules[module], "__file__", None) or "")
    if not script.is_file():
        _log.warning(
            "%s %s is in no file: this process trains with it, and no other one finds it (--config, --resume, "
            "task.reward_workers); put it into a module for that",
            *(kind, name),
        )
        return f"{module}:{name}"
    if name in _names_under_main_guard(script):
        raise InputError(
            f"{kind} {name} stands under `if __name__`, where no other process finds it (--config, --resume); define "
            "it at the top level"
        )
    return f"{relative_to_cwd(script.resolve())}:{name}"


def _names_under_main_guard(script: Path) -> set[str]:
    """Names that a script defines only when run, under `if __name__ == ...`, not when imported."""
    guarded, unguarded = set[str](), set[str]()
    for statement in ast.parse(script.read_bytes()).body:
        is_guard = isinstance(statement, ast.If) and any(
            isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test)
        )
        names = guarded if is_guard else unguarded
        for node in ast.walk(statement):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return guarded - unguarded


def _with_rows_in(folder: Path, config: RunConfig, rows: Mapping[str, Any]) -> RunConfig:
    """The configuration with the paths of the files in the run folder that `rows` are saved in."""
    paths = {name: str(folder.resolve() / ROWS_FILE.format(name)) for name in rows}
    return replace(config, task=replace(config.task, **paths))  # type: ignore[arg-type]


def _write_rows(rows: Mapping[str, Iterable[Mapping[str, Any]]], folder: Path) -> dict[str, int]:
    """Save `rows` in the folder; if they are there already, they must be equal. Returns how many there are of each."""
    counts = dict.fromkeys(rows, 0)
    for name, given in rows.items():
        path = folder / ROWS_FILE.format(name)
        temporary = path.with_suffix(".new")
        if isinstance(given, Mapping):
            raise InputError(
                f"{name} is a {type(given).__name__} of {', '.join(map(str, given))}; give rows, as of one split"
            )
        if not isinstance(given, Iterable):
            raise InputError(f"{name} is {given!r}; give rows, the path of a file or folder of them, or a hub id")
        refuse(
            type(given).__name__ == "DataFrame",
            f"{name} is a DataFrame; give its rows as dicts, those of pandas as {name}.to_dict('records')",
        )
        try:
            with temporary.open("wb") as file:
                for row in given:
                    file.write(_encode_row(f"{name} row {counts[name]}", row))
                    counts[name] += 1
            if path.exists() and not filecmp.cmp(temporary, path, shallow=False):
                raise InputError(f"{name}: these are not the rows that the run began with, which {path} has")
            temporary.replace(path)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error}") from error
        finally:
            temporary.unlink(missing_ok=True)
    return counts


@contextlib.contextmanager
def _name_rows_in_errors(path: str) -> Iterator[None]:
    """Within it an `InputError` on a line of the file names the row of `data`, as the file is soon gone."""
    try:
        yield
    except InputError as error:
        said = re.sub(re.escape(path) + r" line (\d+)", lambda found: f"data row {int(found[1]) - 1}", str(error))
        error.args = (said.replace(path, "data"),)
        raise


def _encode_row(origin: str, row: Mapping[str, Any]) -> bytes:
    """A line of JSON in UTF-8. `InputError`, which names a column of the row: it cannot be written so."""
    if not isinstance(row, Mapping):
        raise InputError(f"{origin} is a {type(row).__name__}; a row is a dict of its columns")
    try:
        return _encode_json(row) + b"\n"
    except (TypeError, ValueError):  # a lone surrogate among them
        for column, value in row.items():
            try:
                _encode_json({column: value})
            except (TypeError, ValueError) as error:
                raise InputError(f"{origin}: {column} cannot be written as JSON: {error}") from error
        raise


def _encode_json(row: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(row), ensure_ascii=False, allow_nan=False, default=_to_list).encode()


def _to_list(value: Any) -> Any:
    if not hasattr(value, "tolist"):
        raise TypeError(f"it holds a {type(value).__name__}")
    return value.tolist()


@contextlib.contextmanager
def _explaining_paths(run_dir: Path, config: RunConfig) -> Iterator[None]:
    """A context in which an `InputError` about a relative path of `config` that is not here says where to resume the
    run from: the folder above the run's that has it, if one does."""
    task, above = config.task, run_dir.absolute().parents
    functions = config.attention_mask, config.loss.loss_type, task.environment, *task.reward, *task.tools
    sources = [function.rpartition(":")[0] for function in (*functions, *config.metrics.trackers) if function]
    given = config.model, config.loss.teacher, task.data, task.validation_data, *sources
    paths = [path for path in given if path and ":" not in path and path[0] not in "/~"]
    try:
        yield
    except InputError as error:
        for path in paths:
            if re.search(rf"(?<![\w/]){re.escape(path)}(?!\w)", str(error)) and not Path(path).exists():
                begun = next((f"{folder}, which has it" for folder in above if (folder / path).exists()), None)
                hint = f"if {path} is a relative path, it starts where the command runs: resume the run from "
                error.args = (f"{error}; {hint}{begun or 'where it was begun'}",)
                break
        raise


def load_run_config(run_dir: Path) -> RunConfig:
    """The configuration of the run in a folder. `InputError`: it is not a run folder, or not readable."""
    path = run_dir / "config.yaml"
    if not os.path.lexists(path):
        runs = [folder for folder in run_dir.absolute().parents[:2] if (folder / "config.yaml").exists()]
        hint = f"; did you mean --resume {relative_to_cwd(runs[0])}?" if runs else ""
        raise InputError(f"--resume {run_dir}: not a run folder (it has no config.yaml){hint}")
    return yaml_file.load_run(run_dir)


def _claim_folder(given: Path | None, recipe: str, lock: contextlib.ExitStack) -> Path:
    """Create, lock and return the run folder: the one given, new or empty, or a new one under runs/."""
    try:
        if given is None:
            folder = _make_new_folder(Path("runs") / f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}")
        else:
            folder = given
            folder.mkdir(parents=True, exist_ok=True)
        lock.enter_context(run_lock.lock_run_folder(folder))
        if any(path.name != run_lock.LOCK_FILE for path in folder.iterdir()):
            is_run = (folder / "config.yaml").exists()
            hint = f", or continue with --resume {folder}" if is_run else ": it holds no run to go on with"
            raise InputError(f"--run-dir {folder} is not empty; name a new folder{hint}")
        return folder
    except OSError as error:
        raise InputError(f"cannot make the run folder: {error}") from error


def _make_new_folder(wanted: Path) -> Path:
    """Create `wanted`, or with a suffix -2, -3, ... if another run began in the same second."""
    path, number = wanted, 1
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            number += 1
            path = wanted.with_name(f"{wanted.name}-{number}")
