"""`lockstep eval`: pass@k against brute force, intervals against their coverage, and a real evaluation."""

from __future__ import annotations

import itertools
import json
import random
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np
import pytest

from lockstep import evaluate
from lockstep.cli.main import main
from lockstep.config import CompileConfig, RunConfig, SamplingConfig, TaskConfig
from lockstep.errors import InputError, LockstepError
from lockstep.rl.loop import Loop
from lockstep.run.closing_lines import next_command
from lockstep.session.build import build
from lockstep.session.evaluation import normal_interval, pass_at_k, render, wilson_interval
from lockstep.session.warm_up import prepare_validation


@pytest.mark.parametrize("n", [1, 2, 5])
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(n: int) -> None:
    for passed, k in itertools.product(range(n + 1), range(1, n + 1)):
        outcomes = [True] * passed + [False] * (n - passed)
        expected = mean(float(any(subset)) for subset in itertools.combinations(outcomes, k))
        assert pass_at_k(n, passed, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_unbiased_where_the_plug_in_is_not() -> None:
    rng, rate, n, k = random.Random(0), 0.2, 10, 5
    counts = [sum(rng.random() < rate for _ in range(n)) for _ in range(20000)]
    truth = 1 - (1 - rate) ** k
    assert abs(mean(pass_at_k(n, c, k) for c in counts) - truth) < 0.006
    assert mean(1 - (1 - c / n) ** k for c in counts) < truth - 0.03  # the negative control


def test_wilson_interval_matches_a_published_value_and_stays_in_bounds() -> None:
    low, high = wilson_interval(0.5, 10)
    assert (round(low, 4), round(high, 4)) == (0.2366, 0.7634)
    assert wilson_interval(0.0, 20)[0] == 0.0 and 0.1 < wilson_interval(0.0, 20)[1] < 0.2
    assert wilson_interval(1.0, 20)[1] == 1.0


def test_intervals_cover() -> None:
    rng = random.Random(1)
    covered = {"wilson": 0, "normal": 0}
    for _ in range(1000):
        rates = [rng.betavariate(1, 1) for _ in range(60)]  # problems of all difficulties, mean 0.5
        counts = [sum(rng.random() < rate for _ in range(4)) for rate in rates]
        low, high = wilson_interval(mean(pass_at_k(4, c, 1) for c in counts), len(counts))
        covered["wilson"] += low <= 0.5 <= high
        low, high = normal_interval([c / 4 for c in counts])
        covered["normal"] += low <= 0.5 <= high
    assert covered["wilson"] >= 950 and 925 <= covered["normal"] <= 975


@pytest.fixture
def config(model: Path, tmp_path: Path) -> RunConfig:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"say {i}", "answer": str(i)}) + "\n" for i in range(6)))
    (tmp_path / "own.py").write_text(
        "def spread(completion_ids, **_):\n    return [1.0 if sum(ids) % 2 else 0.5 for ids in completion_ids]\n\n\n"
        "def never(completions, **_):\n    return [0.0] * len(completions)\n\n\n"
        "def sometimes(prompts, **_):\n    return [None if prompt.endswith('3') else 1.0 for prompt in prompts]\n"
    )
    specs = tuple(f"{tmp_path / 'own.py'}:{name}" for name in ("spread", "never", "sometimes"))
    task = TaskConfig(name="dataset", data=str(rows), validation_data=str(rows), validation_prompts=6, reward=specs)
    return RunConfig(model=str(model), device="cpu", task=task, sampling=SamplingConfig(max_completion_length=6))


def with_environment(config: RunConfig, folder: Path, source: str) -> TaskConfig:
    """The configuration's task in the environment of this source, which alone rewards."""
    (folder / "played.py").write_text(f"from lockstep.environments import End, Environment\n\n\n{source}")
    name = source.removeprefix("class ").partition("(")[0]
    return replace(config.task, environment=f"{folder / 'played.py'}:{name}", reward=())


def test_a_validation_of_several_samples_is_an_evaluation(config: RunConfig) -> None:
    """The same samples of every problem, in graphs that were made before; one sample is greedy."""
    n, compiled = 3, replace(config, compile=CompileConfig("step"))
    run = build(replace(compiled, task=replace(config.task, validation_samples=n)))
    prepare_validation(run, run.validation_sampling)
    found, result = Loop(run.config, run).validate(), evaluate(config, n=n, k=(n,))
    assert run.runtime.recompiles == 0
    assert [name for name in found if "pass@" in name] == [f"validation/pass@{n}"]
    for name in ("reward/mean", f"pass@{n}", *(f"rewards/{name}/mean" for name in ("spread", "never", "sometimes"))):
        assert found[f"validation/{name}"] == pytest.approx(result[name], rel=1e-12), name
    greedy = evaluate(config)
    assert greedy["reward/mean"] != result["reward/mean"]
    assert Loop(run.config, build(config)).validate()["validation/reward/mean"] == pytest.approx(greedy["reward/mean"])
    other = replace(run.config, sampling=SamplingConfig(temperature=0.5), seed=7)
    words = shlex.split(next_command(other, Path("r"), None))
    assert words[words.index("--n") :][:4] == ["--n", "3", "--temperature", "0.5"]
    assert words[words.index("--seed") + 1] == "7"


def test_an_environment_is_played(config: RunConfig, tmp_path: Path) -> None:
    """Its turns are sampled greedily, and its rewards stand beside the functions'."""
    source = (
        "class Asks(Environment):\n    turns = 0\n\n"
        "    def step(self, turn):\n        self.turns += 1\n"
        "        return ' and?' if self.turns == 1 else self.cut()\n"
        "\n    def cut(self):\n        return End({'own': float(self.turns)}, functions=True)\n"
    )
    task = replace(with_environment(config, tmp_path, source), max_turns=3, reward=config.task.reward)
    stops = tuple(map(chr, range(32, 127)))
    result = evaluate(replace(config, task=task, sampling=replace(config.sampling, stop=stops)), pass_reward="own")
    assert 1 < result["environment/turns"] <= 2 and result["rewards/own/mean"] == result["environment/turns"]
    assert result["pass@1"] == 1.0 and result["rewards/never/mean"] == 0.0
    assert result["reward/mean"] > result["rewards/own/mean"] and "environment/given_tokens" in render(result)
    with pytest.raises(InputError, match="^pass_reward other: the rewards are spread, never, sometimes, own"):
        evaluate(replace(config, task=task), pass_reward="other")


def test_metrics_of_an_environment_replace_nothing_that_was_measured(config: RunConfig, tmp_path: Path) -> None:
    source = (
        "class Names(Environment):\n    def step(self, turn):\n        return End(1.0)\n\n"
        "    @classmethod\n    def metrics(cls, trajectories):\n"
        "        return dict.fromkeys(('n', 'reward/mean', 'grad_norm', 'updates', 'mine'), 0.5)\n"
    )
    task = replace(with_environment(config, tmp_path, source), validation_prompts=2)
    result = evaluate(replace(config, task=task))
    assert (result["n"], result["reward/mean"], result["mine"]) == (1, 1.0, 0.5)
    run = build(replace(config, task=task))
    metrics, _ = Loop(run.config, run).step(0)
    assert [metrics[name] for name in ("reward/mean", "grad_norm", "updates", "mine")] == [1.0, 0.0, 0, 0.5]


def test_a_sample_whose_environment_failed_is_left_out(config: RunConfig, tmp_path: Path) -> None:
    """Its problem counts for each k of which it has so many samples left."""
    source = (
        "class Fails(Environment):\n    made = 0\n\n"
        "    def step(self, turn):\n        type(self).made += 1\n"
        "        if self.made == 3:\n            raise OSError('no tool')\n"
        "        return End({'own': float(self.made < 3)})\n"
    )
    task = with_environment(config, tmp_path, source)
    result = evaluate(replace(config, task=task), n=4, k=(1, 3, 4), pass_reward="own")
    assert sorted(row["n"] for row in result["per_problem"]) == [3, 4, 4, 4, 4, 4]
    shares = [row["passed"] / row["n"] for row in result["per_problem"]]
    assert sum(shares) and result["pass@1"] == pytest.approx(mean(shares))
    assert result["pass@4/ci95"] == wilson_interval(result["pass@4"], 5)
    assert result["pass@3/ci95"] == wilson_interval(result["pass@3"], 6) and "pass_unknown" not in result


def test_a_problem_whose_environment_always_failed_is_counted(config: RunConfig, tmp_path: Path) -> None:
    source = (
        "class Broken(Environment):\n    first = None\n\n"
        "    def start(self, row, seed):\n        self.prompt = super().start(row, seed)\n"
        "        type(self).first = self.first or self.prompt\n        return self.prompt\n\n"
        "    def step(self, turn):\n        if self.prompt == self.first:\n            raise OSError('no tool')\n"
        "        return End(1.0)\n"
    )
    task = with_environment(config, tmp_path, source)
    result = evaluate(replace(config, task=task), n=2)
    assert result["groups_without_reward"] == 1 and result["environment/errors"] == 2
    assert result["prompts"] == 6 and len(result["per_problem"]) == 5
    assert "6 problems (1 left out, without a reward)" in render(result)
    with pytest.raises(LockstepError, match=r"failed for 1 .* \(task.max_environment_failures\); the first: OSError"):
        evaluate(replace(config, task=replace(task, max_environment_failures=1)), n=2)


def test_a_k_that_no_problem_has_samples_for_is_told(config: RunConfig, tmp_path: Path) -> None:
    source = (
        "class Fails(Environment):\n    failed = set()\n\n"
        "    def start(self, row, seed):\n        self.seed = seed\n        return super().start(row, seed)\n\n"
        "    def step(self, turn):\n"
        "        if self.seed not in self.failed:\n"
        "            self.failed.add(self.seed)\n            raise OSError('no tool')\n"
        "        return End({'own': 1.0})\n"
    )
    task = with_environment(config, tmp_path, source)
    result = evaluate(replace(config, task=task), n=3, k=(2, 3), pass_reward="own")
    assert result["pass@2"] == 1.0 and "pass@3" not in result and result["pass_unknown"] == [3]
    assert "  pass@3: no problem has 3 scored completions" in render(result).splitlines()


def test_an_evaluation_counts_what_passed(config: RunConfig) -> None:
    result = evaluate(config, n=4, k=(1, 4))
    assert evaluate(config, n=4, k=4)["pass@4"] == result["pass@4"]
    counts = [row["passed"] for row in result["per_problem"]]
    assert result["n"] == 4 and result["prompts"] == 6 and 0 < sum(counts) < 24
    assert result["pass@1"] == pytest.approx(sum(counts) / 24)
    assert result["pass@4"] == pytest.approx(mean(float(c > 0) for c in counts))
    assert result["pass@1/ci95"] == wilson_interval(result["pass@1"], 6)
    assert result["rewards/spread/mean"] == pytest.approx((sum(counts) + 0.5 * (24 - sum(counts))) / 24)
    assert result["pass_reward"] == "spread" and "pass@2" not in result
    assert evaluate(config, n=4, k=(1, 4)) == result  # and again, the same
    lenient = evaluate(config, n=4, pass_threshold=np.float32(0.5))
    assert lenient["pass@1"] == 1.0 and json.loads(json.dumps(lenient))["pass_threshold"] == 0.5


def noted(completions, log_metric, **_):
    for value in range(3):
        log_metric("noted", value)
    return [1.0 for _ in completions]


def test_what_reward_functions_log_is_in_the_result(config: RunConfig) -> None:
    rows = [{"prompt": "1 2="}, {"prompt": "3 4="}]
    result = evaluate(replace(config, task=TaskConfig(name="dataset")), data=rows, rewards=noted)
    assert result["logged/noted"] == 1.0 and "logged/noted" in render(result)


def test_the_deciding_reward_and_problems_it_does_not_apply_to(config: RunConfig, tmp_path: Path) -> None:
    assert evaluate(config, pass_reward="never")["pass@1"] == 0.0
    result = evaluate(config, pass_reward="sometimes")
    assert result["pass@1"] == 1.0 and result["pass@1/ci95"] == wilson_interval(1.0, 5)  # five of the six problems
    assert sorted(row["passed"] is None for row in result["per_problem"]) == [False] * 5 + [True]
    assert "  pass@k is without 1 of the problems, to which sometimes does not apply" in render(result).splitlines()
    assert result["temperature"] == 0.0 and result["n"] == 1 and "groups_without_reward" not in result
    (tmp_path / "judge.py").write_text("def breaks(completions, **_):\n    raise OSError('no judge')\n")
    broken = replace(config.task, reward=(f"{tmp_path / 'judge.py'}:breaks", *config.task.reward[:1]))
    for on_error, passed in ("zero", {"pass@1": 0.0}), ("skip", {"pass_left_out": 6}):
        result = evaluate(replace(config, task=replace(broken, reward_on_error=on_error)))
        assert passed.items() <= result.items() and result["reward_errors/breaks"] == 6
        left_out = "  pass@k is without 6 of the problems, to which breaks does not apply or on which it failed"
        assert "reward_errors/breaks" in render(result) and (left_out in render(result)) == (on_error == "skip")
    alone = replace(config, task=replace(config.task, reward=config.task.reward[2:]))
    assert (result := evaluate(alone))["groups_without_reward"] == 1
    numbers = [row["problem"] for row in result["per_problem"]]
    assert len(numbers) == 5 and sorted(numbers) == numbers and set(numbers) < set(range(6))
    assert render(result).startswith("dataset: 6 problems (1 left out, without a reward), 1 completion each")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "^n is 0; it must be at least 1"),
        ({"n": 4, "k": (1, 8)}, "^k is 1, 8; each must be between 1 and n, which is 4"),
        ({"n": 2.0}, "^n is 2.0, a float; it must be a whole number"),
        ({"n": 4, "k": [1.5, "2"]}, "^k is 1.5, 2; each must be a whole number"),
        ({"n": 4, "k": 2.0}, "^k is 2.0; each must be a whole number"),
        ({"pass_threshold": float("nan")}, "^pass_threshold is nan; it must be a finite number"),
        ({"pass_threshold": "1"}, "^pass_threshold is '1'; it must be a finite number"),
        ({"pass_threshold": 10**400}, r"^pass_threshold is 10+\.\.\.; it must be a finite number"),
        ({"progress": True}, "^progress is True; give a file to write to, such as sys.stderr"),
        ({"n": 2, "temperature": 0.0}, "^temperature is 0, which gives 2 equal completions; raise it, or leave n at 1"),
        ({"pass_reward": "correct"}, "^pass_reward correct: the task's reward functions are spread, never, sometimes"),
    ],
)
def test_settings_that_cannot_work(config: RunConfig, arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        evaluate(config, **arguments)


def test_a_prompt_that_is_too_long_is_named_by_its_row_or_left_out(
    config: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (rows := tmp_path / "long.jsonl").write_text("".join(json.dumps({"prompt": "x" * n}) + "\n" for n in (3, 5000, 4)))
    config = replace(config, task=replace(config.task, data=str(rows), validation_data=str(rows)))
    reason = "the model's context of [0-9]+ less sampling.max_completion_length of 6"
    with pytest.raises(InputError, match=rf"1 of 3 validation .* \({reason}\): .*long.jsonl line 2 \(5000 to"):
        evaluate(config)
    left_out = replace(config, task=replace(config.task, filter_overlong_prompts=True))
    assert evaluate(left_out)["prompts"] == 2 and "left out: 1 of 3 validation prompts" in caplog.text
    caplog.clear()
    assert evaluate(replace(left_out, task=replace(left_out.task, max_prompt_length=3)))["prompts"] == 1
    assert "2 of 3 validation prompts" in caplog.text and "task.max_prompt_length" in caplog.text
    data = ["--data", str(rows), "--reward", config.task.reward[0], "--max-completion-length", "6"]
    command = ["eval", "--model", str(config.model), "--task", "dataset", *data, "--json"]
    assert main(command) == 2 and main([*command, "--filter-overlong-prompts"]) == 0
    with pytest.raises(InputError, match=r"^a prompt has [0-9]+ tokens; at most 2 are allowed \(task.max_prompt"):
        evaluate(replace(config, task=TaskConfig(max_prompt_length=2)))
    with pytest.raises(InputError, match="^a prompt has [0-9]+ tokens; at most 2 are allowed"):
        evaluate(replace(config, task=TaskConfig(max_prompt_length=2, environment="calculator")))
    with pytest.raises(InputError, match="config is of type str; it must be a RunConfig"):
        evaluate("rows.jsonl")  # type: ignore[arg-type]
    config = replace(left_out, sampling=SamplingConfig(max_completion_length=99999))
    with pytest.raises(
        InputError, match="^sampling.max_completion_length is 99999; the model's context of [0-9]+ must"
    ):
        evaluate(config)


def test_a_first_turn_must_fit_unless_the_environment_begins_otherwise(
    config: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = json.loads((Path(str(config.model)) / "config.json").read_text())["max_position_embeddings"]
    sizes = context - 5, context - 6  # with 6 new tokens the first is too long
    (rows := tmp_path / "long.jsonl").write_text("".join(json.dumps({"prompt": "x" * n}) + "\n" for n in sizes))
    (tmp_path / "ends.py").write_text(
        "from lockstep.environments import End, Environment\n\n\nclass Ends(Environment):\n"
        "    def step(self, turn):\n        return End(1.0)\n\n\nclass Own(Ends):\n"
        "    def start(self, row, seed):\n        return 'say 1'\n"
    )
    task = replace(config.task, data=str(rows), validation_data=str(rows), reward=(), filter_overlong_prompts=True)

    def play(environment: str, **changed: object) -> dict:
        kind = f"{tmp_path / 'ends.py'}:{environment}"
        return evaluate(replace(config, task=replace(task, environment=kind, max_turns=2, **changed)))

    assert play("Ends")["prompts"] == 1 and f"long.jsonl line 1 ({sizes[0]} tokens)" in caplog.text
    with pytest.raises(InputError, match=rf"more than {sizes[1]} tokens .*long.jsonl line 1 .*shorten them, or leave"):
        play("Ends", filter_overlong_prompts=False)
    assert play("Own", filter_overlong_prompts=False)["prompts"] == 2
    assert play("Own")["prompts"] == 1


def test_a_task_without_problems(config: RunConfig) -> None:
    with pytest.raises(InputError, match="has no validation problems; give task.data or task.validation_prompts"):
        evaluate(replace(config, task=replace(config.task, validation_prompts=0, validation_data=None)))


def test_rows_that_a_run_held_out_are_evaluated_by_its_next_command(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text("def number(answer, **_):\n    return [float(n) for n in answer]\n")
    task = replace(config.task, validation_data=None, validation_prompts=2, reward=(f"{tmp_path}/own.py:number",))
    words = shlex.split(next_command(replace(config, task=task), tmp_path, None))
    assert main([*words[1:2], "--json", "--model", str(config.model), *words[4:]]) == 0
    assert json.loads(capsys.readouterr().out)["rewards/number/mean"] == 4.5  # of rows 4 and 5
    assert main(["eval", "--model", str(config.model), "--task", "sum-digits", "--held-out"]) == 2
    assert "--held-out has no effect without --data" in capsys.readouterr().err


def test_the_command_reads_an_own_prompt_column(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"problem": "say 1", "answer": "1"}\n')
    (tmp_path / "own.py").write_text("def zero(completions, **_):\n    return [0.0] * len(completions)\n")
    data = ["--task", "dataset", "--data", str(rows), "--reward", f"{tmp_path}/own.py:zero"]
    base = ["eval", "--model", str(model), "--max-completion-length", "4", *data]
    assert main(base) == 2
    assert "has problem, answer; it needs prompt" in (error := capsys.readouterr().err) and "--prompt-column" in error
    assert main([*base, "--prompt-column", "problem", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompts"] == 1


def test_the_command(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["eval", "--model", str(model), "--task", "sum-digits", "--prompts", "3", "--max-completion-length", "4"]
    assert main([*base, "--n", "2", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["prompts"] == 3 and {"reward/mean", "pass@1", "pass@2", "pass@2/ci95"} <= printed.keys()
    assert main([*base, "--n", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "sum-digits: 3 problems, 2 completions each, temperature 0.8"
    low, high = printed["pass@2/ci95"]
    assert f"  {'pass@2':<26} {printed['pass@2']:.4f}   95 % interval {low:.4f} to {high:.4f}" in lines


def test_the_system_prompt_and_the_variables_reach_the_template(
    model: Path, config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(model, tmp_path / "templated")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{{ end }}{% endfor %}")
    rows = [{"prompt": f"be brief!say {i}!", "answer": str(i)} for i in range(6)]
    (tmp_path / "written-out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = ["eval", "--model", str(folder), "--task", "dataset", "--n", "4", "--max-completion-length", "6", "--json"]
    line += ["--device", "cpu", "--reward", config.task.reward[0]]
    chat = ["--system-prompt", "be brief", "--chat-template-kwargs", 'end="!"']
    results = []
    for more in (["--data", str(config.task.data), *chat], ["--data", str(tmp_path / "written-out.jsonl")]):
        assert main([*line, *more]) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[0] == results[1] and 0.5 < results[0]["reward/mean"] < 1
    assert main([*line, "--data", str(config.task.data), *chat[2:]]) == 2
    assert "task.chat_template_kwargs has no effect on text prompts" in capsys.readouterr().err
