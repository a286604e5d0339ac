"""How many generate together: by the time of a decode step, from what is measured and what fits."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep.config import CompileConfig, GeneratorConfig, ParallelConfig, RunConfig, SamplingConfig, TrainerConfig
from lockstep.config.run import resolve_parallel
from lockstep.config.sections.compile import resolve_compile
from lockstep.distributed import World
from lockstep.errors import InputError
from lockstep.models import num_parameters
from lockstep.models.init import architecture
from lockstep.session.build import plan_memory, planned_workload, resolve, task_reader
from lockstep.session.degree import choice, choose_generator_tp_by_memory
from lockstep.session.degree.choice import possible_degrees, select_degree
from lockstep.session.degree.decode_time import CollectiveTimes, DecodeTime, Load
from lockstep.session.memory import Workload, model_config, plan

H200 = 141 << 30
READ = 4e12  # bytes a second
FAST, SLOW = CollectiveTimes(4 * 5e-6, 20e-6), CollectiveTimes(4 * 23e-6, 60e-6)


def workload(prompts: int, samples: int, ranks: int, arch: str = "qwen3-8b", **generator: int) -> Workload:
    """Of eight GPUs, in groups of so many; prompts of 256 tokens, completions of 1,024."""
    config = RunConfig(
        sampling=SamplingConfig(num_generations=samples, max_completion_length=1024),
        trainer=TrainerConfig(prompts_per_step=prompts),
        generator=GeneratorConfig(**generator),
        compile=resolve_compile(CompileConfig(), True),
        parallel=ParallelConfig(generator_tp=ranks),
    )
    limits = {"longest_prompt": 256, "prompt_limit": 32768}
    return Workload(architecture(arch), resolve_parallel(config, 8), 8, torch.bfloat16, **limits)


def times(prompts: int, samples: int, exchanged: CollectiveTimes, **about: int) -> list[DecodeTime]:
    found = []
    for ranks in possible_degrees(architecture("qwen3-8b"), 8):
        w = workload(prompts, samples, ranks, **about)
        waited = exchanged if ranks > 1 else CollectiveTimes()
        found.append(DecodeTime.of(w, Load.of(w, plan(w, H200)), READ, waited))
    return found


def test_a_decode_step_is_what_is_read_and_waited_for() -> None:
    one, *_, eight = times(8, 1, FAST)
    read = 2 * (8_190_735_360 - 151_936 * 4096) / READ  # not the embedding's table
    assert (one.weights, eight.weights) == (pytest.approx(read), pytest.approx(read / 8))
    cached = 36 * 8 * 2 * 128 * 2 * (256 + 512) / READ
    assert one.cache == pytest.approx(cached) == eight.cache and (one.load.rows, eight.load.rows) == (1, 8)
    assert one.exchanges == 0 and eight.exchanges == pytest.approx(36 * 20e-6 + 20e-6)
    assert one.step == one.weights + one.cache and "exchanges 0.74)" in eight.describe()


@pytest.mark.parametrize(
    ("prompts", "samples", "exchanged", "chosen"),
    [
        (8, 1, FAST, 8),  # the weights are most of a step
        (8, 1, CollectiveTimes(4 * 40e-6), 1),  # the links are slow
        (64, 8, FAST, 4),  # 512 sequences of eight would run in two waves
        (64, 8, SLOW, 1),
    ],
)
def test_the_least_time_for_a_steps_samples_is_chosen(
    prompts: int, samples: int, exchanged: CollectiveTimes, chosen: int
) -> None:
    found = times(prompts, samples, exchanged)
    assert [one.load.ranks for one in found] == [1, 2, 4, 8] and select_degree(found) == chosen
    fewest = min(found, key=lambda one: one.of_all)
    assert fewest.load.ranks == chosen or fewest.of_all > 0.95 * found[0].of_all


def test_sequences_that_do_not_run_at_once_take_turns() -> None:
    found = times(64, 8, FAST, max_num_seqs=64)
    assert [one.load.waves for one in found] == [1, 2, 4, 8]
    assert found[3].of_all == 8 * found[3].step and select_degree(found) == 1


def test_what_does_not_fit_is_passed_over() -> None:
    found = times(8, 1, FAST)
    found[3] = replace(found[3], load=replace(found[3].load, fits=False))
    assert select_degree(found) == 4 and found[3].describe().endswith("; does not fit")
    assert select_degree([replace(one, load=replace(one.load, fits=False)) for one in found]) == 1


@pytest.mark.parametrize(("share", "chosen"), [(0.96, 1), (0.94, 2)])
def test_more_generate_together_where_they_take_clearly_less_time(share: float, chosen: int) -> None:
    one, two, *_ = times(8, 1, FAST)
    assert select_degree([one, replace(two, weights=share * one.step, cache=0.0, exchanges=0.0)]) == chosen


def of_eight(arch: str) -> RunConfig:
    config = RunConfig(arch=arch, trainer=TrainerConfig(prompts_per_step=8), parallel=ParallelConfig(fsdp=8))
    return resolve_parallel(replace(config, compile=resolve_compile(CompileConfig(), True)), 8)


def chosen_where(least: int, config: RunConfig, patch: pytest.MonkeyPatch) -> int:
    """How many of eight generate together where one of them has less memory."""
    patch.setattr(World, "gather", lambda self, value, what="": [value] * 7 + [least if type(value) is int else value])
    patch.setattr(choice, "resolve_device", lambda _: torch.device("cuda"))
    patch.setattr(choice, "available_memory", lambda *_: 2 * H200)
    patch.setattr(choice, "join_generator_groups", lambda world, ranks: replace(world, generator_tp=ranks))
    made, world, measured = choice.choose_generator_tp(config, World(size=8), task_reader(config))
    assert made.parallel.generator_tp == world.generator_tp and measured is None
    return world.generator_tp


@pytest.mark.parametrize(("least", "together"), [(2 * H200, 1), (H200 - (8 << 30), 2)])
def test_the_process_with_the_least_memory_has_room(least: int, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen_where(least, of_eight("qwen3-32b"), monkeypatch) == together


def test_a_degree_that_the_model_is_not_made_for_is_refused_before_anything_is_planned() -> None:
    config = resolve_parallel(RunConfig(arch="tiny", parallel=ParallelConfig(tp=3, batch_shards=1)), 3)
    with pytest.raises(InputError, match="parallel.tp is 3, which does not divide the model's num_key_value_heads"):
        planned_workload(config, 3, torch.device("cpu"), task_reader(config))


def test_as_many_generate_together_as_are_planned_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the run's prompts: shorter ones need a smaller cache, and would fit one by one."""
    config = of_eight("qwen3-32b")
    w = planned_workload(config, 8, torch.device("cuda"), task_reader(config))
    sizes = range(90 << 30, 2 * H200, 1 << 24)
    memory = sizes[bisect_left(sizes, True, key=lambda size: plan(w, size).fits) - 1]  # the most that is too little
    assert w.longest_prompt > 1 and plan(replace(w, longest_prompt=1), memory).fits
    assert plan_memory(config, 8, memory / (1 << 30)).generator_tp == chosen_where(memory, config, monkeypatch) == 2


def test_degrees_are_those_of_the_model_and_the_processes() -> None:
    assert list(possible_degrees(architecture("qwen3-8b"), 12)) == [1, 2, 4]
    assert list(possible_degrees(architecture("tiny"), 8)) == [1, 2]


def test_nothing_is_chosen_where_nothing_is_measured() -> None:
    asked = RunConfig(device="cpu", parallel=ParallelConfig(generator_tp=0))
    assert resolve(asked).parallel.generator_tp == 1
    with pytest.raises(InputError, match=r"parallel\.generator_tp is 0, which the processes of a run choose"):
        plan_memory(replace(asked, trainer=TrainerConfig(prompts_per_step=8)), 2)


def test_without_steps_the_fewest_that_have_room_generate_together(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Of which each has its part and the whole table, beside a cache where one is asked for."""
    config = RunConfig(device="cpu", arch="qwen3-0.6b", parallel=ParallelConfig(generator_tp=0))
    cached = replace(config, generator=GeneratorConfig(kv_cache_tokens=1 << 14))
    monkeypatch.setattr(World, "gather_results", lambda self, make, what="": [make()] * self.size)
    monkeypatch.setattr(choice, "join_generator_groups", lambda world, ranks: replace(world, generator_tp=ranks))
    weights = num_parameters(model_config(config)) * 4

    def chosen(asked: RunConfig, memory: float, processes: int = 8) -> int:
        monkeypatch.setattr(choice, "available_memory", lambda *_: int(memory))
        made, world = choose_generator_tp_by_memory(asked, World(size=processes))
        assert made.parallel.generator_tp == world.generator_tp
        return world.generator_tp

    assert [chosen(config, weights * share) for share in (1.34, 1.3, 0.9, 0.7, 0.1)] == [1, 2, 2, 4, 8]
    assert chosen(cached, 1.34 * weights) == 4 and chosen(config, 0.1 * weights, 1) == 1
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 6 and told[1].startswith("parallel.generator_tp: chose 2, whose weights and cache take ")
    given = replace(config, parallel=ParallelConfig(generator_tp=2))
    assert choose_generator_tp_by_memory(given, World(size=4)) == (given, World(size=4))
