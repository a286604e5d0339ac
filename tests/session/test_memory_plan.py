"""What is accepted, adapt_config, proposed and refused."""

from __future__ import annotations

import random
import re
import resource
from dataclasses import replace

import pytest
import torch
from memory_cases import GIB, H200, PARAMETERS, workload

from lockstep.config import CheckpointConfig, CompileConfig, OptimizerConfig, ParallelConfig
from lockstep.config.run import resolve_parallel
from lockstep.errors import InputError
from lockstep.models.checks import memory_bytes
from lockstep.models.init import architecture
from lockstep.session.memory import (
    Workload,
    adapt_config,
    available_memory,
    has_room_for_copy,
    plan,
    require_host_room,
    terms,
    usage,
)
from lockstep.session.memory.plan import ACTIVATIONS, CACHE, CHECK, KEPT_STATE, RESERVE, WORKSPACE, _pool_terms
from lockstep.session.memory.remedies import enlarge_generator_groups, refusal_message, suggest_remedies
from lockstep.session.memory.terms import NOTHING, Recomputed


def test_the_default_settings_fit_eight_gpus() -> None:
    small = plan(workload("qwen3-8b", 8), H200)
    assert small.fits and small.recomputed == NOTHING and small.cache_tokens == 64 * (1024 + 16)
    assert small.terms[ACTIVATIONS] > 70 * GIB and small.total < H200
    large = workload("qwen3-14b", 8)
    memory = H200 - terms.masters(large) // 2
    found = plan(large, memory)
    assert found.fits and 0 < found.recomputed.layers < 5 and found.recomputed.elementwise and found.total <= memory
    one_less = terms.activations(
        large, found.recomputed._replace(layers=found.recomputed.layers - 1)
    ) - terms.activations(large, found.recomputed)
    assert found.total + one_less > memory - GIB  # no more than needed
    names = tuple(f"layers.{i}" for i in range(found.recomputed.layers))
    assert adapt_config(large, found).compile.recompute == ("elementwise", "logits", *names)
    assert f", {len(names)} layers and norms and activations and logits computed again" in found.table()
    roomier = plan(large, memory + 4 * GIB)
    assert roomier.fits and adapt_config(large, roomier).compile.recompute == ("elementwise", "logits")
    most = plan(large, memory + 14 * GIB)
    assert most.fits and most.recomputed == (0, True, False) and "computed again" in most.table()


def test_the_trainer_has_the_caches_memory_where_layers_would_be_computed_again() -> None:
    w = workload("qwen3-14b", 8)
    apart = plan(w.with_settings("compile", cudagraph_mode="piecewise"), H200)
    found = plan(w, H200)
    assert found.fits and found.lends_cache and not apart.lends_cache and found.recomputed < apart.recomputed
    tight = plan(workload("qwen3-0.6b", 1), 20 * GIB)
    assert tight.pool == tight.terms[CACHE] > tight.terms[ACTIVATIONS] == 0 and found.pool > found.terms[CACHE]
    assert found.total <= H200 and found.cache_tokens >= apart.cache_tokens
    in_turn = terms.activations(w, found.recomputed) + terms.workspace(w, found.recomputed) + terms.transit(w)
    beside = sum(found.terms[name] for name in (ACTIVATIONS, "head and backward", "in transit"))
    assert beside == in_turn - found.terms[CACHE] and found.terms["generation"] == terms.prefill(w)
    assert "in whose memory the trainer computes in between" in found.table() and found.to_dict()["lent"]
    assert not plan(workload("qwen3-8b", 8), H200).lends_cache  # there is room for both


def test_what_fits_with_the_caches_memory_alone_is_not_refused() -> None:
    w = workload("qwen3-30b-a3b", 8, max_tokens_per_micro_batch=4096).with_settings(
        "generator", kv_cache_tokens=100_000
    )
    found = plan(w, 148 * GIB)
    assert found.fits and found.lends_cache and NOTHING < found.recomputed < (w.model.num_layers, True)
    assert not plan(w.with_settings("compile", cudagraph_mode="piecewise"), 148 * GIB).fits
    set_by_hand = w.with_settings("compile", recompute=("full",))
    assert (
        plan(set_by_hand, 148 * GIB).lends_cache and not plan(set_by_hand, 153 * GIB).lends_cache
    )  # as much is computed again


def test_with_the_caches_memory_a_teachers_scores_are_beside_the_generators_pool() -> None:
    """What they take beyond what the trainer's graphs do, where a student is small."""
    w = replace(workload("qwen3-0.6b", 1), frozen=(architecture("qwen3-32b"),))
    layers = Recomputed(w.model.num_layers, logits=True)
    beyond = terms.scoring(w, True) - terms.activations(w, layers) - terms.workspace(w, layers) - terms.transit(w)
    assert beyond > terms.prefill(w) > 0
    assert [_pool_terms(w, layers, lent)[0]["generation"] for lent in (False, True)] == [
        beyond,
        terms.prefill(w) + beyond,
    ]


def test_a_graph_that_gathers_weights_takes_more_than_one_that_reads_them_whole() -> None:
    w = workload("qwen3-8b", 8)
    gathers = replace(w, config=replace(w.config, parallel=replace(w.config.parallel, zero_stage=3)))
    shares = replace(w, config=replace(w.config, parallel=replace(w.config.parallel, tp=2)))
    plans = [plan(one, H200) for one in (w, gathers, shares, workload("qwen3-8b", 1))]
    assert [found.zero_stage for found in plans] == [2, 3, 3, 0]
    assert ", ZeRO stage 2\n" in plans[0].table() and plans[1].to_dict()["zero_stage"] == 3
    layer = 4096 * 10240 + 3 * 4096 * 12288 + 2 * 4096 + 256
    more = terms.transit(gathers) - terms.transit(w)
    gathered = 2 * 2 * layer + 2 * 151936 * 4096  # two layers and the head, in bfloat16, and what a rank sends of it
    assert more == pytest.approx(gathered * 9 / 8, rel=1e-6)


def test_what_does_not_fit_is_refused_and_every_remedy_fits() -> None:
    w = workload("qwen3-32b", 8)
    found = plan(w, H200)
    assert not found.fits
    message = refusal_message(w, found)
    assert "16 GPUs" in message and "weights" in message and "of 141.00 GiB" in message
    more = resolve_parallel(replace(w.config, parallel=replace(w.config.parallel, batch_shards=16)), 16)
    assert plan(replace(w, config=more, ranks=16), H200).fits
    of_two = workload("qwen3-32b", 2)
    of_two = replace(of_two, config=replace(of_two.config, parallel=ParallelConfig(tp=2, batch_shards=1)))
    for memory in (40 * GIB, 56 * GIB):  # more pairs of GPUs, each with a shard
        assert (said := list(suggest_remedies(of_two, memory))) and all(fits_with(of_two, one, memory) for one in said)
    w = replace(w, config=resolve_parallel(replace(w.config, parallel=ParallelConfig(fsdp=8)), 8))
    assert all(
        fits_with(w, one, H200) for one in suggest_remedies(w, H200)
    ) and "--parallel.fsdp 16" in refusal_message(w, found)
    crowded = workload("qwen3-8b", 8, CompileConfig(activation_memory_gib=100.0), max_tokens_per_micro_batch=40960)
    offered = list(suggest_remedies(crowded, H200))
    assert offered[0] == "--trainer.max-tokens-per-micro-batch 20480" and "--compile.recompute full" in offered
    without = CompileConfig(passes=("canonicalize", "keep_logits"))  # where it would be refused
    offered = list(suggest_remedies(workload("qwen3-8b", 8, without, max_tokens_per_micro_batch=40960), H200))
    assert offered and not any("recompute" in one for one in offered)


@pytest.mark.parametrize("seed", range(12))
def test_plans_agree_with_one_another(seed: int) -> None:
    """What is accepted fits in what it takes, in more memory and in smaller micro-batches, and is planned alike once
    adapted; what is refused does not fit in less, and what is proposed fits. Of the seeds 8 are accepted."""
    draw = random.Random(seed)
    arch = draw.choice(["qwen3-0.6b", "qwen3-8b", "qwen3-32b", "gpt-oss-20b-4-layers"])
    ranks, memory = draw.choice([1, 2, 8, 16]), draw.choice([40, 80, 141]) * GIB
    w = workload(arch, ranks, max_tokens_per_micro_batch=draw.choice([4096, 16384]), warmup_steps=draw.choice([0, 1]))
    c = replace(w.config, optimizer=OptimizerConfig(offload=draw.random() < 0.3))
    c = replace(c, parallel=replace(c.parallel, zero_stage=draw.choice([None, 3])))
    w = replace(w, config=c, frozen=draw.choice([(), [w.model]]))
    found = plan(w, memory)
    if not found.fits:
        assert not plan(w, memory * 19 // 20).fits
        assert all(fits_with(w, said, memory) for said in suggest_remedies(w, memory))
        return
    assert found.total <= memory and found.cache_tokens >= w.sequence_tokens and min(found.terms.values()) >= 0
    assert plan(w, found.total).fits and plan(replace(w, config=adapt_config(w, found)), memory) == found
    more = plan(w, memory + 8 * GIB)
    assert more.fits and (more.recomputed, -more.cache_tokens) <= (found.recomputed, -found.cache_tokens)
    half = replace(c, trainer=replace(c.trainer, max_tokens_per_micro_batch=c.trainer.max_tokens_per_micro_batch // 2))
    assert plan(replace(w, config=half), memory).fits
    if ranks > 1:
        alone = replace(c, parallel=replace(c.parallel, batch_shards=0))
        assert plan(replace(w, ranks=2 * ranks, config=resolve_parallel(alone, 2 * ranks)), memory).fits


def fits_with(w: Workload, said: str, memory: int) -> bool:
    """Whether a workload does with settings that a refusal names, in larger groups if it must."""
    for section, name, value in re.findall(r"--(\w+)\.([\w-]+)(?: (\w+))?", said):
        field, given = name.replace("-", "_"), {"recompute": ("full",), "offload": True}.get(name) or int(value)
        part = replace(getattr(w.config, section), **{field: given})
        w = replace(w, config=replace(w.config, **{section: part}))
    if more := re.search(r"^(\d+) GPUs", said):
        alone = replace(w.config, parallel=replace(w.config.parallel, batch_shards=0))
        w = replace(w, ranks=int(more[1]), config=resolve_parallel(alone, int(more[1])))
    return plan(w, memory).fits or enlarge_generator_groups(w, memory) is not w


def test_several_processes_have_a_part_of_a_reference_each_and_whole_layers_at_a_time() -> None:
    w = replace(workload("qwen3-8b", 8), frozen=[architecture("qwen3-8b")])
    found = plan(w, H200)
    assert found.fits and found.recomputed == NOTHING and terms.frozen(w) == terms.masters(w) // 2
    assert found.terms[CHECK] == plan(workload("qwen3-8b", 8), H200).terms[CHECK]
    larger = replace(w, config=replace(w.config, parallel=replace(w.config.parallel, generator_tp=2)))
    whole = 2 * PARAMETERS["qwen3-8b"]
    assert (
        0 < terms.eager_check(larger) - terms.eager_check(w) < whole / 4
    )  # a layer's that nobody has whole, and both tables
    assert terms.scoring(w, False) - terms.scoring(w, True) > whole / 2  # called eagerly it is gathered at once


def test_a_critic_is_planned_for_and_may_be_frozen_or_trained_alone() -> None:
    w = workload("qwen3-0.6b", 1)
    critic = w.with_settings("loss", loss_type="ppo")
    assert critic.layout.size - w.layout.size == w.model.hidden_size
    assert critic.with_settings("optimizer", freeze=("value_head",)).layout.size == w.layout.size
    assert critic.with_settings("optimizer", freeze=("model.*",)).layout.size == w.model.hidden_size


def test_a_state_on_the_host_is_planned_there_and_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "available_memory", lambda _: 128 << 30)
    w = workload("qwen3-8b", 1, max_tokens_per_micro_batch=4096)
    refused = plan(w, H200)
    (offered,) = (one for one in suggest_remedies(w, H200) if "offload" in one)
    assert not refused.fits and offered == "--optimizer.offload, with 91.5 GiB of the host's memory a GPU"
    config = replace(w.config, optimizer=OptimizerConfig(offload=True), checkpoint=CheckpointConfig(interval=5))
    found = plan(replace(w, config=config), H200)
    assert found.fits and found.terms["masters"] == found.terms["moments"] == 0
    assert found.terms["chunks of the state"] == 24 << 24 and terms.state_copies(replace(w, config=config)) == 0
    supervised = replace(w, config=replace(w.config, trainer=replace(w.config.trainer, warmup_steps=1)))
    assert [terms.state_copies(one) // w.layout.size for one in (w, supervised)] == [2, 4]
    assert terms.state_copies(workload("qwen3-8b", 8)) == 0  # whole weights are beside the masters
    assert refused.host[terms.COPIED] == 2 * w.layout.size - terms.MOST_COPIED
    state = 12 * w.layout.size
    kept, chunk, most = found.terms[KEPT_STATE], 12 << 24, (1 - RESERVE) * H200
    assert found.recomputed == Recomputed(elementwise=True) and 0 < kept < state and kept % chunk == 0
    assert found.total <= most < found.total + 1.1 * chunk
    assert plan(replace(w, config=config), 2 * H200).terms[KEPT_STATE] == state
    assert all(KEPT_STATE not in one.terms for one in (refused, plan(replace(w, config=config), found.total - kept)))
    read = 4 * 151936 * 4096
    assert found.host == {"masters and moments": state, "copy for checkpoints": state, "weights being read": read}
    folder = replace(w, config=replace(config, model="a folder"))
    assert terms.host(folder, True) == {**found.host, terms.READING: 32 << 20}
    assert "on the host: masters and moments 91.5" in found.table()
    with pytest.raises(InputError, match=r"optimizer.offload needs 1024.0 GiB of the host's memory a process, and th"):
        require_host_room(replace(found, host={terms.STATE_ON_HOST: 1 << 40}))
    assert not has_room_for_copy(found, torch.device("cuda")) and has_room_for_copy(
        replace(found, host={}), torch.device("cuda")
    )


def test_a_process_may_take_no_more_than_its_limit_of_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = available_memory(torch.device("cpu"))
    monkeypatch.setattr(resource, "getrlimit", {resource.RLIMIT_AS: (GIB, resource.RLIM_INFINITY)}.__getitem__)
    assert available_memory(torch.device("cpu")) == GIB < whole


def test_the_processes_of_a_container_share_what_it_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for limit, share in ((1 << 62, memory_bytes("cpu") // 8), (560 << 20, 70 << 20)):
        monkeypatch.setattr(usage, "cgroup_memory_limit", lambda limit=limit: limit)
        assert available_memory(torch.device("cpu")) == share


def test_nothing_that_the_user_chose_is_changed() -> None:
    for chosen in (CompileConfig(recompute=("silu_mul",)), CompileConfig(activation_memory_gib=8.0)):
        w = workload("qwen3-14b", 8, chosen)
        assert adapt_config(w, plan(w, 2 * H200)) is w.config
    given = replace(workload("qwen3-8b", 8), config=workload("qwen3-8b", 8).config)
    fixed = replace(given.config, generator=replace(given.config.generator, kv_cache_tokens=4096))
    assert plan(replace(given, config=fixed), H200).cache_tokens == 4096


@pytest.mark.parametrize(
    ("chosen", "beside"),
    [
        (CompileConfig(recompute=("elementwise", "layers.[0-5]")), ("elementwise", "layers.[0-5]")),
        (CompileConfig("joint"), ()),
        (CompileConfig(passes=("keep_logits",)), None),
    ],
)
def test_logits_are_counted_where_they_are_kept_and_computed_again_beside_what_the_user_chose(
    chosen: CompileConfig, beside: tuple[str, ...] | None
) -> None:
    w = workload("qwen3-4b", 1, chosen).with_settings("compile", cudagraph_mode="none")
    kept = plan(w, 2 * H200)
    assert (
        kept.fits
        and not kept.recomputed.logits
        and kept.terms[WORKSPACE] == terms.head(w, recomputed=False) > terms.logits(w)
    )
    assert adapt_config(w, kept) is w.config
    tight = plan(w, kept.total - GIB - kept.terms[CACHE])
    if beside is None:  # no pass that would be told
        assert tight.recomputed == kept.recomputed and adapt_config(w, tight) is w.config
        return
    assert tight.fits and tight.recomputed == kept.recomputed._replace(logits=True)
    assert adapt_config(w, tight).compile.recompute == (*beside, "logits")
    assert plan(replace(w, config=adapt_config(w, tight)), tight.memory) == tight


def test_the_cache_takes_what_is_left() -> None:
    w = workload("qwen3-8b", 8, CompileConfig(activation_memory_gib=100.0))
    least = plan(w, H200)
    tight = plan(w, least.total - 2 * GIB)
    assert tight.fits and tight.recomputed == (0, False, True) and 0 < tight.terms[CACHE] < least.terms[CACHE]
    assert least.total - 3 * GIB < tight.total <= least.total - 2 * GIB
    without = replace(w, config=replace(w.config, parity="off", compile=replace(w.config.compile, verify="off")))
    assert plan(without, H200).terms[CHECK] == 0
    beside = plan(replace(w, config=replace(w.config, parity="off")), H200).terms[CHECK]
    assert terms.MOST_COPIED <= beside == plan(w, H200).terms[CHECK], "the machine's is within the pool"
    small = workload("qwen3-0.6b", 1, CompileConfig(recompute=("full",)))
    small = small.with_settings("trainer", max_tokens_per_micro_batch=2048).with_settings(
        "generator", max_num_batched_tokens=256
    )
    for mode, whole in (("full", True), ("full_and_piecewise", False), ("piecewise", False), ("none", False)):
        assert bool(plan(small.with_settings("compile", cudagraph_mode=mode), H200).pool) == whole
    more = plan(small, H200)
    assert more.pool == terms.machine_check(small, more.recomputed) and more.terms[CHECK] > beside
