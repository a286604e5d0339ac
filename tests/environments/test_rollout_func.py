"""TRL's `rollout_func`: what its docs do with one trains unchanged, and tokens that this run did not sample do not."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import scripted_folder

from lockstep.config import RunConfig, SamplingConfig, TaskConfig, TrainerConfig
from lockstep.environments import make_environment
from lockstep.environments.adapters.rollout_func import TrlGeneration
from lockstep.errors import InputError, LockstepError
from lockstep.run.train import train
from lockstep.types import SampleIdentity, SamplingParams, Segment, Trajectory


def generate_rollout_completions(trainer: Any, prompts: list[Any]) -> list[dict[str, Any]]:
    """As TRL had it until the function's users were to write it: vLLM in server mode."""
    how = {"n": 1, "temperature": trainer.temperature, "top_k": trainer.top_k, "top_p": trainer.top_p}
    how |= {"min_p": 0.0 if trainer.min_p is None else trainer.min_p, "max_tokens": trainer.max_completion_length}
    output = trainer.vllm_generation.vllm_client.chat(
        messages=prompts,
        **how,
        chat_template_kwargs=trainer.chat_template_kwargs,
        tools=trainer.tools or None,
        chat_template=trainer.chat_template,
    )
    names = ("prompt_ids", "completion_ids", "logprobs")
    return [{name: list(output[name][i]) for name in names} for i in range(len(prompts))]


def echo(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
    """TRL's guide to OpenEnv: complete all prompts, and have an environment reward them."""
    outputs = generate_rollout_completions(trainer, prompts)
    tokenizer = trainer.processing_class
    texts = [tokenizer.decode(output["completion_ids"], skip_special_tokens=True) for output in outputs]
    rewards = [len(text) / 10 for text in texts]
    return {name: [output[name] for output in outputs] for name in outputs[0]} | {"env_reward": rewards}


def turns(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
    """An episode a prompt, one after another, with what the environment says masked out."""
    given = trainer.processing_class.encode("<|im_end|>\n2", add_special_tokens=False)
    found: dict[str, list[Any]] = {
        name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask", "env_reward")
    }
    for prompt in prompts:
        (ids,), *_ = trainer._tokenize_prompts([prompt])
        (first,), (values,) = trainer._generate_single_turn([ids], None, {}, trainer.num_generations)
        (second,), (more,) = trainer._generate_single_turn([ids + first + given], None, {}, trainer.num_generations)
        found["prompt_ids"].append(ids)
        found["completion_ids"].append(first + given + second)
        found["logprobs"].append(values + [0.0] * len(given) + more)
        found["env_mask"].append([1] * len(first) + [0] * len(given) + [1] * len(second))
        found["env_reward"].append(float(len(found["env_reward"])))
    return found


def best_of_two(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    tries = [generate_rollout_completions(trainer, prompts) for _ in range(2)]
    assert tries[0] != tries[1], "what is asked for again has other random numbers"
    best = [max(two, key=lambda one: len(one["completion_ids"])) for two in zip(*tries, strict=True)]
    names, drawn = (
        ("prompt_ids", "completion_ids", "logprobs"),
        [float(sum(len(one["completion_ids"]) for one in two)) for two in zip(*tries, strict=True)],
    )
    return {name: [one[name] for one in best] for name in names} | {"env_reward": drawn, "note": "of all"}


def reward_from_env(completions: list[Any], **kwargs: Any) -> list[float]:
    """TRL's guide."""
    env_rewards = kwargs.get("env_reward", [])
    return [float(reward) for reward in env_rewards] if env_rewards else [0.0] * len(completions)


def changed(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    found = echo(prompts, trainer)
    found["completion_ids"][1] = [*found["completion_ids"][1][:-1], 7]
    return found


def joined(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """TRL's guide to OpenEnv, its games: an episode a prompt, whose turns have prompts of their own and are joined."""
    names = ("prompt_ids", "completion_ids", "logprobs")
    found: dict[str, list[Any]] = {name: [] for name in (*names, "env_reward")}
    for prompt in prompts:
        episode: dict[str, list[Any]] = {name: [] for name in names}
        for turn in range(2):
            observed = [{**prompt[0], "content": f"{prompt[0]['content']} ({turn})"}]
            (output,) = generate_rollout_completions(trainer, [observed])
            for name in names:
                episode[name].extend(output[name])
        for name in names:
            found[name].append(episode[name])
        found["env_reward"].append(float(len(episode["completion_ids"])))
    return found


def hotter(prompts: list[Any], trainer: Any) -> Any:
    return trainer.vllm_generation.vllm_client.chat(prompts, temperature=1.5)


def short(prompts: list[Any], trainer: Any) -> Any:
    return {name: values[:-1] for name, values in echo(prompts, trainer).items()}


def own_prompts(prompts: list[Any], trainer: Any) -> Any:
    """The rows' prompts are not what is completed."""
    return echo([[{"role": "user", "content": f"{len(str(prompt))}, is it 5"}] for prompt in prompts], trainer)


def tensors(prompts: list[Any], trainer: Any) -> Any:
    found = echo(prompts, trainer)
    arrays = {name: [torch.tensor(one) for one in found[name]] for name in ("prompt_ids", "completion_ids", "logprobs")}
    return found | arrays | {"env_mask": [torch.ones_like(one) for one in arrays["completion_ids"]]}


def numbers(prompts: list[Any], trainer: Any) -> Any:
    return echo(prompts, trainer) | {"completion_ids": [3] * len(prompts)}


def floats(prompts: list[Any], trainer: Any) -> Any:
    return echo(prompts, trainer) | {"prompt_ids": [[0.5]] * len(prompts)}


def mask_of_one(prompts: list[Any], trainer: Any) -> Any:
    return echo(prompts, trainer) | {"env_mask": 1}


def named_as_an_argument(prompts: list[Any], trainer: Any) -> Any:
    return echo(prompts, trainer) | {"completions": prompts}


def exits(prompts: list[Any], trainer: Any) -> Any:
    raise SystemExit(3)


def nothing(prompts: list[Any], trainer: Any) -> Any:
    return {"prompt_ids": [], "completion_ids": []}


def broken(prompts: list[Any], trainer: Any) -> Any:
    return trainer.accelerator.gather(prompts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("rollouts")
    rows = [{"prompt": [{"role": "user", "content": f"Row {i}, is it 5"}]} for i in range(4)]
    (made / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    scripted_folder(made / "model")
    return made


def trained(folder: Path, name: str | None) -> tuple[dict[str, Any], list[Any]]:
    """Its certificate, and its samples."""
    environment = {} if name is None else {"environment": f"{__file__}:{name}", "max_turns": 3}
    config = RunConfig(
        steps=1,
        model=str(folder / "model"),
        task=TaskConfig(
            "dataset",
            str(folder / "rows.jsonl"),
            reward=(f"{__file__}:reward_from_env",),
            validation_prompts=0,
            **environment,  # type: ignore[arg-type]
        ),
        sampling=SamplingConfig(temperature=18.0, num_generations=2, max_completion_length=10),
        trainer=TrainerConfig(prompts_per_step=2, skip_zero_variance=False),
    )
    run = folder / str(name)
    train(config, run, resume=False)
    lines = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    numbers = [(line["group"], sample["sample"]) for line in lines for sample in line["samples"]]
    assert len(set(numbers)) == len(numbers)
    return json.loads((run / "parity.json").read_text()), [sample for line in lines for sample in line["samples"]]


def test_the_guides_function_has_the_bits_of_no_function_and_forwards_its_fields(folder: Path) -> None:
    _, plain = trained(folder, None)
    certificate, samples = trained(folder, "echo")
    assert certificate["identical"] and certificate["tokens_checked"] == sum(len(s["token_ids"]) for s in samples)
    assert [s["token_ids"] for s in samples] == [s["token_ids"] for s in plain] and len(samples) == 4
    assert [s["token_ids"] for s in trained(folder, "tensors")[1]] == [s["token_ids"] for s in plain]
    assert [s["rewards"] for s in samples] == [{"reward_from_env": len(s["text"]) / 10} for s in samples]


def test_a_rows_prompt_that_is_too_long_may_stay_unused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": "x" * 100_000}) + "\n" for _ in range(4)))
    (tmp_path / "model").symlink_to(folder / "model")
    certificate, samples = trained(tmp_path, "own_prompts")
    assert certificate["identical"] and certificate["tokens_checked"] == sum(len(s["token_ids"]) for s in samples) > 0
    with pytest.raises(InputError, match="asked for a turn after 100000 tokens; the run allows 1 to 2048"):
        trained(tmp_path, "echo")


def test_turns_are_trained_and_what_is_masked_is_given(folder: Path) -> None:
    certificate, samples = trained(folder, "turns")
    assert certificate["identical"] and certificate["tokens_checked"] == sum(len(s["token_ids"]) for s in samples) > 0
    assert [len(s["segments"]) for s in samples] == [4] * 4
    assert {s["reward"] for s in samples} == {0.0, 1.0, 2.0, 3.0}


def test_turns_that_are_joined_are_branches(folder: Path) -> None:
    certificate, samples = trained(folder, "joined")
    assert certificate["identical"] and certificate["tokens_checked"] == sum(s["reward"] for s in samples) > 0
    assert [len(s["segments"]) for s in samples] == [4] * 4


def test_what_was_drawn_and_not_returned_is_compared_too(folder: Path) -> None:
    certificate, samples = trained(folder, "best_of_two")
    drawn = sum(s["reward"] for s in samples if s["reward"] is not None)
    assert certificate["identical"] and certificate["tokens_checked"] == drawn
    assert drawn == sum(s["tokens"] for s in samples) > sum(s["tokens"] for s in samples if s["reward"] is not None)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("changed", r"step 1 group 0 .* sample 1: token 1 of the completion .* was not sampled by this run"),
        ("hotter", "rollout_func asked for temperature 1.5; the run samples with 18.0: pass trainer.temperature"),
        ("short", "short returned 3 prompt_ids for 4 prompts; give one each"),
        ("nothing", "nothing must return a dict with prompt_ids, completion_ids, logprobs; there is no logprobs"),
        (
            "numbers",
            r"numbers returned completion_ids \[3, 3, 3, 3\]; they must be a list of token ids for each prompt",
        ),
        ("floats", r"floats returned prompt_ids \[\[0\.5\], .*; they must be a list of token ids for each prompt"),
        ("mask_of_one", "mask_of_one returned env_mask 1; they must be a list of numbers for each prompt"),
        ("named_as_an_argument", "named_as_an_argument returned a field 'completions'; name it by a text"),
        ("exits", "exits raised SystemExit: 3"),
        ("broken", "broken raised AttributeError: .*gather"),
    ],
)
def test_what_it_may_not_do_is_refused(folder: Path, name: str, told: str) -> None:
    with pytest.raises(LockstepError, match=told):
        trained(folder, name)


def test_tools_beside_it_are_refused() -> None:
    with pytest.raises(InputError, match="task.tools has no effect beside .* plays its own rollouts"):
        make_environment(TaskConfig(environment=f"{__file__}:echo", tools=(f"{__file__}:reward_from_env",)))


class Drawing:
    """Stands for the engine: what follows a prompt is a function of it and of the key, which is all that there is."""

    def complete(self, prompts: list[list[int]], sampling: SamplingParams, keys: list[SampleIdentity]) -> list[Any]:
        words = [random.Random(repr((ids, key))).choices(range(3), k=2) for ids, key in zip(prompts, keys, strict=True)]
        return [Trajectory([Segment(p), Segment(w, True)], "stop") for p, w in zip(prompts, words, strict=True)]


@pytest.mark.parametrize("in_pieces", [1, 2, 3])
def test_the_draws_do_not_depend_on_how_prompts_are_shared_and_asked(in_pieces: int) -> None:
    """Two turns of three samples of four prompts, in one process and in several, in one call and in pieces."""
    prompts = {0: [1, 2], 1: [1, 2, 3], 2: [9], 3: [7, 7]}

    def drawn(groups: list[int], pieces: int) -> dict[int, list[Any]]:
        owners = {SampleIdentity(0, 0, 0, g, s): prompts[g] for g in groups for s in range(3)}
        generation = TrlGeneration(Drawing(), SamplingParams(max_completion_length=8), owners)  # type: ignore[arg-type]
        asked = [(g, prompts[g]) for g in groups for _ in range(3)]
        found: dict[int, list[Any]] = {g: [] for g in groups}
        for _ in range(2):
            told = []
            for i in range(0, len(asked), -(-len(asked) // pieces)):
                part = asked[i : i + -(-len(asked) // pieces)]
                told += generation.single_turn([ids for _, ids in part])[0]
            asked = [(g, [*ids, *turn, 5]) for (g, ids), turn in zip(asked, told, strict=True)]
        for g, ids in asked:
            found[g].append(ids)
        return found

    whole = drawn([0, 1, 2, 3], 1)
    assert drawn([0, 1, 2, 3], in_pieces) == whole
    assert drawn([0, 2], in_pieces) | drawn([1, 3], 1) == whole
    assert drawn([0], in_pieces) | drawn([1], 1) | drawn([2], 1) | drawn([3], in_pieces) == whole


def test_tokens_that_are_no_samples_are_drawn_anew_for_each_who_asks() -> None:
    """More than once, for several samples at one time, and on several processes or in several rounds."""

    def keys(group: int) -> list[SampleIdentity]:
        play, found = Drawing(), list[SampleIdentity]()
        complete, play.complete = play.complete, lambda *given: found.extend(given[2]) or complete(*given)  # type: ignore
        owners = {SampleIdentity(0, 0, 0, group, s): [1, 2] for s in range(3)}
        generation = TrlGeneration(play, SamplingParams(max_completion_length=8), owners)  # type: ignore[arg-type]
        for asked in ([[4, 4]] * 3, [[4, 4]] * 2, [[1, 2]] * 3, [[1, 2]]):
            generation.single_turn(asked)
        return found

    both = keys(0) + keys(5)
    assert len(set(both)) == len(both) == 18
    assert both[5:8] == [SampleIdentity(0, 0, 0, 0, s) for s in range(3)]
