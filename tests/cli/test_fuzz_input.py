"""Random configurations, flags, rows, model configurations and reward results: accepted or refused, never a traceback.

`pytest tests/cli/test_fuzz_input.py --hypothesis-profile thorough` tries fifty times as many.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.cli.main import main
from lockstep.config import RunConfig, TaskConfig, validate, yaml_file
from lockstep.environments.data.rows import read_problems
from lockstep.environments.rewards.reward_set import Completions, Reward, RewardSet
from lockstep.environments.tasks.gsm8k import check_answer
from lockstep.errors import InputError
from lockstep.models.hf.folder import read_config

relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
fewer = settings(relaxed, max_examples=max(10, settings.default.max_examples // 4))

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([10**9, 2**63, -(2**70), 1e-9, 0.5, 1.0, float("nan"), float("inf")]),
    st.text(max_size=6),
    st.sampled_from(["auto", "none", "step", "full", "off", "strict", "dataset", "gsm8k", "math", "1e-6", "a=1", "."]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
DEFAULT = RunConfig()
SECTIONS = {f.name: getattr(DEFAULT, f.name) for f in fields(DEFAULT) if is_dataclass(getattr(DEFAULT, f.name))}
PLAIN = [f.name for f in fields(DEFAULT) if f.name not in SECTIONS]


def section(name: str) -> st.SearchStrategy[Any]:
    keys = st.sampled_from([f.name for f in fields(SECTIONS[name])]) | st.text(max_size=3)
    return st.dictionaries(keys, VALUES, max_size=3) | VALUES


CONFIGS = st.builds(
    dict.__or__,
    st.dictionaries(st.sampled_from(PLAIN) | st.text(max_size=3), VALUES, max_size=3),
    st.fixed_dictionaries({}, optional={name: section(name) for name in SECTIONS}),
)


@relaxed
@given(CONFIGS)
def test_configurations(tmp_path: Path, values: dict[str, Any]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    try:
        config = validate(yaml_file.load(path))
    except InputError as error:
        assert str(error)
        return
    yaml_file.save(config, path)
    assert yaml_file.load(path) == config


@relaxed
@given(st.binary(max_size=60) | st.text(st.sampled_from("a:{}[]&*!?|>-# \n\t\"'%,0x"), max_size=60).map(str.encode))
def test_files_that_are_hardly_yaml(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    try:
        yaml_file.load(path)
    except InputError as error:
        assert str(path) in str(error)


def _flags() -> st.SearchStrategy[list[str]]:
    names = [f"--{name}.{f.name.replace('_', '-')}" for name, value in SECTIONS.items() for f in fields(value)]
    names += [f"--{name.replace('_', '-')}" for name in PLAIN]
    words = st.sampled_from(["-1", "0", "1", "2", "0.5", "nan", "1e30", "x", "", "none", "step", "full", "a=1"])
    flag = st.tuples(st.sampled_from(names), st.lists(words, max_size=2)).map(lambda pair: [pair[0], *pair[1]])
    return st.lists(flag, max_size=3, unique_by=lambda words: words[0]).map(lambda rows: sum(rows, []))


@fewer
@given(st.sampled_from(["sum-digits", "gsm8k", "dataset", "nonsense"]), _flags())
def test_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: str, flags: list[str]
) -> None:
    """The model does not exist, so that whatever gets past the flags is refused too."""
    monkeypatch.chdir(tmp_path)
    model = [] if "--model" in flags else ["--model", "./nothing"]
    assert main(["train", recipe, *flags, *model]) == 2
    assert "Traceback" not in capsys.readouterr().err


KEYS = st.sampled_from(["prompt", "question", "answer", "prompts", "reward_model"]) | st.text(max_size=3)
MESSAGES = st.lists(st.dictionaries(st.sampled_from(["role", "content", "x"]), VALUES, max_size=3), max_size=3)
LINES = st.one_of(
    st.dictionaries(KEYS, VALUES | MESSAGES, max_size=4).map(lambda row: json.dumps(row).encode()),
    st.builds(lambda prompt: json.dumps({"prompt": prompt}).encode(), st.text(min_size=1) | MESSAGES),
    st.binary(max_size=20),
)


@relaxed
@given(st.lists(LINES, max_size=4), st.sampled_from([None, "Be brief."]), st.booleans())
def test_rows(tmp_path: Path, lines: list[bytes], system_prompt: str | None, gsm8k: bool) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(lines))
    config = TaskConfig(name="dataset", system_prompt=system_prompt)
    try:
        problems = read_problems(str(path), config, check_answer if gsm8k else lambda problem: None)
    except InputError as error:
        assert str(path) in str(error)
        return
    for problem in problems:
        assert problem.prompt and problem.origin.startswith(f"{path} line ")


@relaxed
@given(st.data())
def test_model_configurations(model: Path, tmp_path: Path, data: st.DataObject) -> None:
    right = json.loads((model / "config.json").read_text())
    changes = data.draw(st.dictionaries(st.sampled_from([*right, "rope_scaling", "num_experts"]), VALUES, max_size=3))
    if data.draw(st.booleans()):
        changes["model_type"] = data.draw(st.sampled_from(["qwen3", "qwen3_moe", "llama"]))
    (tmp_path / "config.json").write_text(json.dumps(right | changes))
    try:
        read_config(tmp_path)
    except InputError as error:
        assert str(tmp_path) in str(error)


@relaxed
@given(VALUES | st.lists(SCALARS, min_size=2, max_size=2), st.sampled_from(["raise", "zero", "skip"]))
def test_reward_results(result: Any, on_error: Any) -> None:
    rewards = RewardSet([Reward("r", lambda completions: result)], on_error)
    try:
        scores = rewards.score(Completions(["p", "q"], ["a", "b"], [[1], [2]], [{}, {}]))
    except InputError as error:
        assert str(error).startswith("reward r returned ")
        return
    assert len(scores.totals) == 2 and all(total is None or abs(total) < 1e300 for total in scores.totals)
