"""The terms against numbers made by hand and bytes that traces keep; what is accepted, adapted and refused."""

from __future__ import annotations

import json
import random
import re
import resource
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import finished
from small import CONFIG, DEEPSEEK, FAMILIES, make_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lockstep import ops
from lockstep.cli.main import main
from lockstep.config import (
    CheckpointConfig,
    CompileConfig,
    GeneratorConfig,
    LossConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrainerConfig,
    yaml_file,
)
from lockstep.config.run import resolve_parallel
from lockstep.config.sections.compile import resolve_compile
from lockstep.distributed import World
from lockstep.errors import InputError
from lockstep.generator import Engine, SharedWeights
from lockstep.graph import Runtime
from lockstep.graph.check import snapshot
from lockstep.graph.passes import recompute, saved_bytes
from lockstep.models import Decoder, PackedAttention
from lockstep.models.config import MLAConfig, MoEConfig
from lockstep.models.init import ARCHITECTURES, architecture, initialize
from lockstep.ops.logprobs import operator as logprobs
from lockstep.session.build import build
from lockstep.session.memory import (
    Workload,
    adapted,
    holds_copy,
    in_larger_groups,
    memory_at_hand,
    plan,
    refusal,
    remedies,
    require_host_room,
    running_out_named,
    terms,
    usage,
    used,
)
from lockstep.session.memory.plan import CACHE, CHECK, KEPT, _pool
from lockstep.trainer import BatchShape, Trainer
from lockstep.trainer.packing import blank_batch
from lockstep.types import SampleIdentity, SamplingParams

GIB = 1 << 30
H200 = 141 * GIB


def workload(arch: str, ranks: int, compile: CompileConfig | None = None, **trainer: int) -> Workload:
    """64 prompts of 256 tokens, 8 samples of 512."""
    config = RunConfig(
        sampling=SamplingConfig(num_generations=8, max_completion_length=512),
        trainer=TrainerConfig(**({"prompts_per_step": 64} | trainer)),  # type: ignore[arg-type]
        compile=resolve_compile(compile or CompileConfig(), True),
    )
    limits = {"longest_prompt": 256, "prompt_limit": 32768}
    return Workload(architecture(arch), resolve_parallel(config, ranks), ranks, torch.bfloat16, **limits)


# ---- terms ----

# Parameters of Qwen3: embedding (and head) V D, a layer D (2 A H + 2 K H) + 3 D F + 2 D + 2 H, and a norm D.
PARAMETERS = {
    "qwen3-0.6b": 151936 * 1024 + 28 * (1024 * 6144 + 3 * 1024 * 3072 + 2 * 1024 + 256) + 1024,
    "qwen3-8b": 2 * 151936 * 4096 + 36 * (4096 * 10240 + 3 * 4096 * 12288 + 2 * 4096 + 256) + 4096,
    "qwen3-14b": 2 * 151936 * 5120 + 40 * (5120 * 12288 + 3 * 5120 * 17408 + 2 * 5120 + 256) + 5120,
    "qwen3-32b": 2 * 151936 * 5120 + 64 * (5120 * 18432 + 3 * 5120 * 25600 + 2 * 5120 + 256) + 5120,
}
# Of a layer and a token: (stream twice, two norms) D, fused projection, rotated, attention's output, 3 F; 4 A.
KEPT_A_TOKEN = {
    "qwen3-0.6b": 28 * (2 * (4 * 1024 + 4096 + 3072 + 2048 + 3 * 3072) + 64),
    "qwen3-8b": 36 * (2 * (4 * 4096 + 6144 + 5120 + 4096 + 3 * 12288) + 128),
    "qwen3-14b": 40 * (2 * (4 * 5120 + 7168 + 6144 + 5120 + 3 * 17408) + 160),
    "qwen3-32b": 64 * (2 * (4 * 5120 + 10240 + 9216 + 8192 + 3 * 25600) + 256),
}


@pytest.mark.parametrize("arch", PARAMETERS)
@pytest.mark.parametrize("ranks", [1, 8])
def test_what_stays_is_so_many_bytes_a_parameter(arch: str, ranks: int) -> None:
    w, count = workload(arch, ranks), PARAMETERS[arch]
    assert terms.weights(w) == 2 * count
    padding = 1024 * (2 + 11 * w.model.num_layers + 1)  # less than a block a parameter
    for term, bytes_each in ((terms.masters, 4), (terms.moments, 8), (terms.gradients, 4)):
        assert 0 <= term(w) - bytes_each * count / ranks <= bytes_each * (padding + 1024)
    in_cells = replace(w.config, parallel=replace(w.config.parallel, batch_shards=32, cell=16))  # of several rounds
    assert terms.gradients(replace(w, config=in_cells)) == 2 * terms.gradients(w)
    assert terms.shard(w) == (0 if ranks == 1 else terms.masters(w) // 2)
    assert terms.frozen(replace(w, frozen=[w.model])) == (2 * count if ranks == 1 else terms.shard(w))
    position = {"qwen3-0.6b": 28, "qwen3-8b": 36, "qwen3-14b": 40, "qwen3-32b": 64}[arch] * 8 * 256 * 2
    assert terms.cache(w, 4096) == (4096 + 16) * position


@pytest.mark.parametrize(("iterations", "parts", "quarters"), [(1, 1, 0), (2, 1, 4), (1, 4, 3), (2, 4, 4), (1, 2, 2)])
def test_supports_are_of_what_later_updates_read(iterations: int, parts: int, quarters: int) -> None:
    updates = {"num_iterations": iterations, "num_mini_batches": parts}
    w = workload("qwen3-0.6b", 8, max_tokens_per_micro_batch=1 << 20, **updates)
    quarter = 64 // 8 * 8 * 512 * 151936 // 8 // 4
    assert terms.supports(w.having("sampling", top_p=0.9)) == quarters * quarter and terms.supports(w) == 0
    groups = 64 // 8 // parts  # of a micro-batch
    assert w.shape[:3] == (groups * (256 + 8 * 511), groups * 8 * 512, groups * 9)


@pytest.mark.parametrize("arch", KEPT_A_TOKEN)
def test_what_a_micro_batch_keeps(arch: str) -> None:
    w = workload(arch, 8)
    tokens, scored = w.shape.tokens, w.shape.completion_tokens
    assert tokens == 16384
    hidden = w.model.hidden_size
    ends = tokens * (2 * hidden + 512) + scored * (2 * hidden + 40)
    assert terms.kept(w) == tokens * KEPT_A_TOKEN[arch] + ends
    assert terms.kept(w, w.model.num_layers) == tokens * w.model.num_layers * 2 * hidden + ends
    assert terms.head(w) >= 151936 * hidden * 2 + scored * hidden * 6


@pytest.mark.parametrize("family", ["deepseek_v3"])
def test_a_trace_keeps_as_much(family: str) -> None:
    model, shape = FAMILIES.get(family) or architecture(f"tiny-{family}"), BatchShape(64, 48, 5, 40)
    w = replace(workload("tiny", 1), model=model)
    w.__dict__["shape"] = shape
    runtime = Runtime(CompileConfig("step"), torch.device("cpu"))
    trainer = Trainer(initialize(Decoder(model, torch.bfloat16), 0), OptimizerConfig(), LossConfig(), runtime=runtime)
    trainer.forward_backward(blank_batch(shape, SamplingParams(), True, model.moe is not None))
    (traced,) = trainer.programs.by_name["forward_backward"].made.traces.values()
    statistics = 4 * model.num_heads * shape.tokens  # of attention's rows, which a CPU makes anew
    for again in range(model.num_layers + 1):
        found = adapted(w, replace(plan(w, H200), again=again)).compile.recompute
        bytes_kept = saved_bytes(recompute(traced, found)[0] if found else traced)
        own = terms.kept(w, again) - statistics * (model.num_layers - again)
        assert own == pytest.approx(bytes_kept, rel=0.03), again


TOKENS = 64


def kept_by_layer(decoder: Decoder, index: int) -> tuple[int, int]:
    """Of one layer. On a GPU attention also keeps a float32 number a row and head."""
    seen, handles = Crossings(), list[RemovableHandle]()
    layer = decoder.layers[index]
    routes: list[Any] | None = [] if decoder.config.moe_layers else None
    starts, start_S, length_S = (empty(count, torch.int32) for count in (2, 1, 1))
    attend = PackedAttention(ops.Packed(starts, start_S, length_S, TOKENS))
    rope = ops.rope_table(empty(TOKENS, torch.int64), decoder.inv_freq)
    x = empty(TOKENS, decoder.embed.dtype, decoder.config.hidden_size).requires_grad_()
    for module in layer.modules():
        handles += [module.register_forward_pre_hook(seen.enter), module.register_forward_hook(seen.leave)]
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(seen.save, lambda tensor: tensor):
            out = layer(index, x, rope, attend, routes)
    finally:
        for handle in handles:
            handle.remove()
    seen.save(out)
    outside = [*decoder.parameters(), *attend.packed[:3], rope, x]
    whole, again = seen.sizes({place(tensor) for tensor in outside})
    return whole // TOKENS + 4 * decoder.heads[0], again // TOKENS


class Crossings:
    """Tensors that a call keeps, and those that go in and out of modules, by where they lie."""

    def __init__(self) -> None:
        self._saved: dict[int, Tensor] = {}
        self._crossing: dict[int, Tensor] = {}

    def save(self, tensor: Tensor) -> Tensor:
        self._saved[place(tensor)] = tensor
        return tensor

    def enter(self, _: nn.Module, arguments: Any) -> None:
        self._cross(arguments)

    def leave(self, _: nn.Module, __: Any, results: Any) -> None:
        self._cross(results)

    def _cross(self, values: Any) -> None:
        if isinstance(values, Tensor):
            self._crossing[place(values)] = values
        for value in values if type(values) is tuple else ():  # what a router found is for others
            self._cross(value)

    def sizes(self, outside: set[int]) -> tuple[int, int]:
        """Bytes of what was saved and does not lie `outside`: of all, and of what crosses modules."""
        sizes = {at: x.untyped_storage().nbytes() for at, x in self._saved.items() if at not in outside}
        return sum(sizes.values()), sum(size for at, size in sizes.items() if at in self._crossing)


def place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def empty(count: int, dtype: torch.dtype, *more: int) -> Tensor:
    return torch.empty(count, *more, dtype=dtype, device="meta")


@pytest.mark.parametrize("arch", sorted(name for name in ARCHITECTURES if name.startswith("tiny")))
def test_each_family_keeps_what_its_layers_do_when_they_are_called_without_memory(arch: str) -> None:
    model = architecture(arch)
    rel = 0.01 if model.moe is None else 0.03  # the numbers of routes are left out
    w = replace(workload("tiny", 1), model=model)
    two = replace(w, config=replace(w.config, parallel=ParallelConfig(tp=2)), ranks=2)
    for of, decoder in (w, w.decoder), (two, Decoder(model, w.dtype, "meta", two.training)):
        for layer in range(model.num_layers):
            found = kept_by_layer(decoder, layer)
            assert [terms.layer_kept(of, layer, again) for again in (False, True)] == pytest.approx(found, rel=rel)


PLANNING = """
import sys
from lockstep.session import build
from lockstep.config import RunConfig
traced = "sympy", "torch.fx.experimental.symbolic_shapes", "torch._dynamo"
assert not any(name in sys.modules for name in traced)
build.plan_of(RunConfig(device="cpu"), 1, 141)
print([name for name in traced if name in sys.modules])
"""


def test_planning_imports_no_tracer() -> None:
    done = finished([sys.executable, "-c", PLANNING])
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


# ---- plans ----


def test_the_default_settings_fit_eight_gpus() -> None:
    small = plan(workload("qwen3-8b", 8), H200)
    assert small.fits and small.again == 0 and small.cache_tokens == 64 * (1024 + 16)
    assert small.terms[KEPT] > 70 * GIB and small.total < H200
    large = workload("qwen3-14b", 8)
    found = plan(large, H200)
    assert found.fits and 0 < found.again < 40 and found.total <= H200
    one_less = terms.kept(large, found.again - 1) - terms.kept(large, found.again)
    assert found.total + one_less > H200 - GIB  # no more than needed
    assert adapted(large, found).compile.recompute == tuple(f"layers.{i}" for i in range(found.again))


def test_the_trainer_has_the_caches_memory_where_layers_would_be_computed_again() -> None:
    w = workload("qwen3-14b", 8)
    apart = plan(w.having("compile", cudagraph_mode="piecewise"), H200)
    found = plan(w, H200)
    assert found.fits and found.lent and not apart.lent and found.again < apart.again
    tight = plan(workload("qwen3-0.6b", 1), 20 * GIB)
    assert tight.pool == tight.terms[CACHE] > tight.terms[KEPT] == 0 and found.pool > found.terms[CACHE]
    assert found.total <= H200 and found.cache_tokens >= apart.cache_tokens
    in_turn = terms.kept(w, found.again) + terms.working(w, found.again) + terms.transit(w)
    beside = sum(found.terms[name] for name in (KEPT, "head and backward", "in transit"))
    assert beside == in_turn - found.terms[CACHE] and found.terms["generation"] == terms.prefill(w)
    assert "in whose memory the trainer computes in between" in found.table() and found.to_dict()["lent"]
    assert not plan(workload("qwen3-8b", 8), H200).lent  # there is room for both


def test_what_fits_with_the_caches_memory_alone_is_not_refused() -> None:
    w = workload("qwen3-30b-a3b", 8, max_tokens_per_micro_batch=4096).having("generator", kv_cache_tokens=100_000)
    found = plan(w, 155 * GIB)
    assert found.fits and found.lent and 0 < found.again < w.model.num_layers
    assert not plan(w.having("compile", cudagraph_mode="piecewise"), 155 * GIB).fits
    set_by_hand = w.having("compile", recompute=("full",))
    assert plan(set_by_hand, 155 * GIB).lent and not plan(set_by_hand, 160 * GIB).lent  # as much is computed again


def test_with_the_caches_memory_a_teachers_scores_are_beside_the_generators_pool() -> None:
    """What they take beyond what the trainer's graphs do, where a student is small."""
    w = replace(workload("qwen3-0.6b", 1), frozen=(architecture("qwen3-32b"),))
    layers = w.model.num_layers
    beyond = terms.scoring(w, True) - terms.kept(w, layers) - terms.working(w, layers) - terms.transit(w)
    assert beyond > terms.prefill(w) > 0
    assert [_pool(w, layers, lent)[0]["generation"] for lent in (False, True)] == [beyond, terms.prefill(w) + beyond]


class Live(TorchDispatchMode):
    """Bytes of tensors that were made within and are there, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes, self.now, self.most = dict[int, int](), 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {place(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and (at := place(tensor)) not in given and at not in self.sizes:
                storage = tensor.untyped_storage()
                self.sizes[at] = storage.nbytes()
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.gone, at)
        return found

    def gone(self, at: int) -> None:
        self.now -= self.sizes.pop(at, 0)


PREFILLED = {  # widths in the ratios of Qwen3-8B, Qwen3-30B-A3B and DeepSeek-V3
    "dense": replace(CONFIG, hidden_size=256, intermediate_size=768, num_heads=4, num_kv_heads=1, head_dim=64),
    "experts": replace(
        CONFIG, family="qwen3_moe", hidden_size=256, num_heads=8, num_kv_heads=1, head_dim=64,
        moe=MoEConfig(16, 8, 96, dense_layers=()),
    ),
    "latent": replace(
        DEEPSEEK, hidden_size=448, num_heads=8, head_dim=64, mla=MLAConfig(96, 512, 64, 128, 128),
        moe=MoEConfig(16, 8, 128, (0,), True, 4, 2, scale=2.5, shared_experts=1, router_bias=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", PREFILLED)
def test_a_step_of_prompt_tokens_takes_no_more_than_planned(kind: str) -> None:
    tokens, model = 1024, replace(PREFILLED[kind], max_position_embeddings=2048)
    settings = GeneratorConfig(max_num_seqs=2, max_num_batched_tokens=tokens, page_size=16)
    engine = Engine(SharedWeights(make_model(torch.float32, 0, model)), settings, 2 * tokens)
    with Live() as live:
        prompt = [5 + i % 50 for i in range(tokens)]
        engine.generate([prompt], [SamplingParams(max_completion_length=1)], [SampleIdentity(0, 0, 0, 0)])
    w = Workload(model, RunConfig(generator=settings), 1, torch.float32, longest_prompt=tokens, prompt_limit=tokens)
    assert 0.4 < live.most / terms.prefill(w) < 1


def test_a_graph_that_gathers_weights_takes_more_than_one_that_reads_them_whole() -> None:
    w = workload("qwen3-8b", 8)
    gathers = replace(w, config=replace(w.config, parallel=replace(w.config.parallel, zero_stage=3)))
    shares = replace(w, config=replace(w.config, parallel=replace(w.config.parallel, tp=2)))
    plans = [plan(one, H200) for one in (w, gathers, shares, workload("qwen3-8b", 1))]
    assert [found.zero_stage for found in plans] == [2, 3, 3, 0]
    assert ", ZeRO stage 2\n" in plans[0].table() and plans[1].to_dict()["zero_stage"] == 3
    layer = 4096 * 10240 + 3 * 4096 * 12288 + 2 * 4096 + 256
    more = terms.transit(gathers) - terms.transit(w)
    assert more == pytest.approx(2 * 2 * layer + 2 * 151936 * 4096, rel=1e-6)  # two layers and the head, in bfloat16


def test_every_axis_has_a_communicator_that_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found, buffers = [], []
    for settings in ({"cell": 64}, {"tp": 2}, {"tp": 2, "generator_tp": 4}, {"tp": 16}, {"cell": 4}):
        w = workload("qwen3-8b", 16)
        w = replace(w, config=replace(w.config, parallel=replace(w.config.parallel, batch_shards=0, **settings)))
        found.append([axis.size for axis in w.axes])
        talking = terms.communicators(w.axes)
        assert terms.context(w) == terms.CONTEXT + talking
        taken = terms.BEGUN + talking + GIB - 5_000_000  # by another process, or by buffers that nobody planned
        free, kept = H200 - taken, [GIB]  # one of the allocator's
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free, kept=kept: (free - sum(kept), H200))
        monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
        world = World(size=16, tp=w.tp, generator_tp=w.config.parallel.generator_tp, lanes=w.cells.lanes)
        assert memory_at_hand(torch.device("cuda"), world) == H200 - GIB
        buffers.append(talking / GIB)
    assert found == [[16], [8, 2], [8, 2, 4], [16], [16, 4, 4]]
    assert buffers == [4, 4 + 1, 4 + 1 + 2, 4, 0.5 + 2 + 2]  # in cells no parts are exchanged among all sixteen
    assert terms.context(workload("qwen3-8b", 1)) == terms.CONTEXT


def test_what_does_not_fit_is_refused_and_every_remedy_fits() -> None:
    w = workload("qwen3-32b", 8)
    found = plan(w, H200)
    assert not found.fits
    message = refusal(w, found)
    assert "16 GPUs" in message and "weights" in message and "of 141.00 GiB" in message
    more = resolve_parallel(replace(w.config, parallel=replace(w.config.parallel, batch_shards=16)), 16)
    assert plan(replace(w, config=more, ranks=16), H200).fits
    of_two = workload("qwen3-32b", 2)
    of_two = replace(of_two, config=replace(of_two.config, parallel=ParallelConfig(tp=2, batch_shards=1)))
    for memory in (40 * GIB, 56 * GIB):  # more pairs of GPUs, each with a shard
        assert (said := list(remedies(of_two, memory))) and all(fits_with(of_two, one, memory) for one in said)
    w = replace(w, config=resolve_parallel(replace(w.config, parallel=ParallelConfig(fsdp=8)), 8))
    assert all(fits_with(w, one, H200) for one in remedies(w, H200)) and "--parallel.fsdp 16" in refusal(w, found)
    crowded = workload("qwen3-8b", 8, CompileConfig(activation_memory_gib=100.0), max_tokens_per_micro_batch=40960)
    offered = list(remedies(crowded, H200))
    assert offered[0] == "--trainer.max-tokens-per-micro-batch 20480" and "--compile.recompute full" in offered


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
        assert all(fits_with(w, said, memory) for said in remedies(w, memory))
        return
    assert found.total <= memory and found.cache_tokens >= w.sequence_tokens and min(found.terms.values()) >= 0
    assert plan(w, found.total).fits and plan(replace(w, config=adapted(w, found)), memory) == found
    more = plan(w, memory + 8 * GIB)
    assert more.fits and (more.again, -more.cache_tokens) <= (found.again, -found.cache_tokens)
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
    return plan(w, memory).fits or in_larger_groups(w, memory) is not w


def test_several_processes_have_a_part_of_a_reference_each_and_whole_layers_at_a_time() -> None:
    w = replace(workload("qwen3-8b", 8), frozen=[architecture("qwen3-8b")])
    found = plan(w, H200)
    assert found.fits and found.again == 0 and terms.frozen(w) == terms.shard(w)
    assert found.terms[CHECK] == plan(workload("qwen3-8b", 8), H200).terms[CHECK]
    larger = replace(w, config=replace(w.config, parallel=replace(w.config.parallel, generator_tp=2)))
    whole = 2 * PARAMETERS["qwen3-8b"]
    assert 0 < terms.eager(larger) - terms.eager(w) < whole / 4  # a layer's that nobody has whole, and both tables
    assert terms.scoring(w, False) - terms.scoring(w, True) > whole / 2  # called eagerly it is gathered at once


def test_a_state_on_the_host_is_planned_there_and_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "memory_at_hand", lambda _: 128 << 30)
    w = workload("qwen3-8b", 1, max_tokens_per_micro_batch=4096)
    refused = plan(w, H200)
    (offered,) = (one for one in remedies(w, H200) if "offload" in one)
    assert not refused.fits and offered == "--optimizer.offload, with 91.5 GiB of the host's memory a GPU"
    config = replace(w.config, optimizer=OptimizerConfig(offload=True), checkpoint=CheckpointConfig(interval=5))
    found = plan(replace(w, config=config), H200)
    assert found.fits and found.terms["masters"] == found.terms["moments"] == 0
    assert found.terms["chunks of the state"] == 24 << 24 and terms.state_copies(replace(w, config=config)) == 0
    supervised = replace(w, config=replace(w.config, trainer=replace(w.config.trainer, warmup_steps=1)))
    assert [terms.state_copies(one) // w.layout.size for one in (w, supervised)] == [2, 4]
    assert terms.state_copies(workload("qwen3-8b", 8)) == 0  # whole weights are beside the masters
    assert refused.host[terms.COPIED] == 2 * w.layout.size - snapshot.MOST and terms.MOST_COPIED == snapshot.MOST
    state = 12 * w.layout.size
    read = 4 * 151936 * 4096
    assert found.host == {"masters and moments": state, "copy for checkpoints": state, "weights being read": read}
    folder = replace(w, config=replace(config, model="a folder"))
    assert terms.host(folder, True) == {**found.host, terms.READING: 32 << 20}
    assert "on the host: masters and moments 91.5" in found.table()
    with pytest.raises(InputError, match=r"optimizer.offload needs 1024.0 GiB of the host's memory a process, and th"):
        require_host_room(replace(found, host={terms.STATE_ON_HOST: 1 << 40}))
    assert not holds_copy(found, torch.device("cuda")) and holds_copy(replace(found, host={}), torch.device("cuda"))


def test_a_process_may_take_no_more_than_its_limit_of_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = memory_at_hand(torch.device("cpu"))
    monkeypatch.setattr(resource, "getrlimit", {resource.RLIMIT_AS: (GIB, resource.RLIM_INFINITY)}.__getitem__)
    assert memory_at_hand(torch.device("cpu")) == GIB < whole


def test_nothing_that_the_user_chose_is_changed() -> None:
    for chosen in (CompileConfig(recompute=("silu_mul",)), CompileConfig(activation_memory_gib=8.0)):
        w = workload("qwen3-14b", 8, chosen)
        assert adapted(w, plan(w, H200)) is w.config
    given = replace(workload("qwen3-8b", 8), config=workload("qwen3-8b", 8).config)
    fixed = replace(given.config, generator=replace(given.config.generator, kv_cache_tokens=4096))
    assert plan(replace(given, config=fixed), H200).cache_tokens == 4096


def test_the_cache_takes_what_is_left() -> None:
    w = workload("qwen3-8b", 8, CompileConfig(activation_memory_gib=100.0))
    least = plan(w, H200)
    tight = plan(w, least.total - 2 * GIB)
    assert tight.fits and tight.again == 0 and 0 < tight.terms[CACHE] < least.terms[CACHE]
    assert least.total - 3 * GIB < tight.total <= least.total - 2 * GIB
    without = replace(w, config=replace(w.config, parity="off", compile=replace(w.config.compile, verify="off")))
    assert plan(without, H200).terms[CHECK] == 0
    beside = plan(replace(w, config=replace(w.config, parity="off")), H200).terms[CHECK]
    assert terms.MOST_COPIED <= beside == plan(w, H200).terms[CHECK], "the machine's is within the pool"
    small = workload("qwen3-0.6b", 1, CompileConfig(recompute=("full",)))
    small = small.having("trainer", max_tokens_per_micro_batch=2048).having("generator", max_num_batched_tokens=256)
    for mode, whole in (("full", True), ("full_and_piecewise", False), ("piecewise", False), ("none", False)):
        assert bool(plan(small.having("compile", cudagraph_mode=mode), H200).pool) == whole
    more = plan(small, H200)
    assert more.pool == terms.machine_check(small) and more.terms[CHECK] > beside


def test_constants_are_those_of_the_operators() -> None:
    assert logprobs.CHUNK == terms.LOGIT_ROWS
    backward = pytest.importorskip("lockstep.ops.logprobs.triton_backward")
    assert backward.CHUNK_BYTES == terms.GRADIENT_CHUNK


# ---- runs ----

RUN = RunConfig(
    steps=1,
    device="cpu",
    task=TaskConfig(easy=True),
    sampling=SamplingConfig(num_generations=2, max_completion_length=8, ignore_eos=True),
    trainer=TrainerConfig(prompts_per_step=2, skip_zero_variance=False),
    generator=GeneratorConfig(kv_cache_tokens=256),
    compile=CompileConfig("step", verify="off"),
)


def test_a_run_computes_again_what_its_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    session = build(replace(RUN, loss=LossConfig(beta=0.1)))
    assert session.plan.again == 0 and session.config.compile.recompute == ()
    shown, taken = session.plan.to_dict()["terms_gib"], used(session.trainer, session.engine.cache, session.runtime)
    for name in ("weights", "moments", "gradients", "reference or teacher", "KV cache"):
        assert taken[name] == pytest.approx(shown[name], rel=0.02, abs=1e-3), name
    monkeypatch.setattr("lockstep.session.build.memory_at_hand", lambda *_: session.plan.total - 1000)
    tight = build(session.config)
    assert tight.plan.fits and tight.plan.again == 1 and tight.plan.cache_tokens == 256
    assert tight.config.compile.recompute == tight.runtime.config.recompute == ("layers.0",)
    monkeypatch.setattr("lockstep.session.build.memory_at_hand", lambda *_: 1 << 20)
    with pytest.raises(InputError, match="may take 0.0:(.|\n)*What would fit"):
        build(RUN)


@pytest.mark.parametrize("place", ["lockstep.session.build.Trainer", "lockstep.rl.loop.Loop.step"])
def test_running_out_is_answered_with_the_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture, place: str
) -> None:
    def run_out(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of 3 GiB.")

    monkeypatch.setattr(place, run_out)
    yaml_file.save(replace(RUN, compile=CompileConfig()), tmp_path / "config.yaml")
    assert main(["train", "--config", str(tmp_path / "config.yaml"), "--run-dir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "memory ran out: CUDA out of memory. Tried to allocate 2.00 GiB" in said and "Traceback" not in said
    assert "it was planned as\n" in said and "--trainer.max-tokens-per-micro-batch" in said
    with pytest.raises(InputError, match=r"memory ran out on rank 1 \("), running_out_named(str, World(1, 2)):
        raise RuntimeError("CUDA error: out of memory")
    for error in (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), MemoryError()):
        with (
            pytest.raises(InputError, match="memory ran out: (Default|MemoryError)"),
            running_out_named(str, World(0, 1)),
        ):
            raise error
    with pytest.raises(RuntimeError, match="something else"), running_out_named(str, World(0, 1)):
        raise RuntimeError("something else")


def test_the_command_plans_for_gpus_that_are_not_here(capsys: pytest.CaptureFixture) -> None:
    given = [
        "plan",
        "--arch",
        "qwen3-8b",
        "--trainer.prompts-per-step",
        "64",
        "--sampling.max-completion-length",
        "512",
    ]
    asked = [*given, "--world", "8", "--device-memory-gib"]
    assert main([*asked, "141", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory_gib"] == 141 and found["fits"] and found["terms_gib"]["weights"] == 15.256
    assert main([*asked, "39"]) == 2
    said = capsys.readouterr().err.partition("What would fit: ")[2]
    assert "--optimizer.offload, with 11.4 GiB" in said and "; 16 GPUs (torchrun)" in said  # two generating together
    assert main([*given, "--world", "7", "--device-memory-gib", "141"]) == 2
    assert "7 shards" in capsys.readouterr().err
    assert main([*asked, "141", "--parallel.fsdp", "3"]) == 2
    assert "parallel.fsdp is 3, and there are 8 processes; start it with torchrun" in capsys.readouterr().err
    refused_by_train = {
        "--compile.cudagraph-mode full --compile.capture step": "CUDA graphs need a GPU",
        "--optimizer.offload": "the device is a CPU",
        "--attention flex --attention-mask nowhere:mask": "attention_mask 'nowhere:mask'",
    }
    for flags, why in refused_by_train.items():
        assert main([*given, "--device", "cpu", *flags.split()]) == 2 and why in capsys.readouterr().err
    assert main([*asked, "141", "--dtype", "float32"]) == 2 and "dtype is float32" in capsys.readouterr().err
    assert main([*asked, "141", "--device", "cpu"]) == 2 and "add --device cuda" in capsys.readouterr().err
    assert main([*given, "--world", "0"]) == 2 and main([*given, "--device-memory-gib", "-1"]) == 2
    assert "--world is 0" in capsys.readouterr().err
