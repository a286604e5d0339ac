"""The terms against numbers made by hand, and bytes that traces and calls keep."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from memory_cases import GIB, H200, PARAMETERS, place, workload
from small import CONFIG, DEEPSEEK, FAMILIES, make_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lockstep import ops
from lockstep.config import (
    LOGITS,
    CompileConfig,
    GeneratorConfig,
    LossConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
)
from lockstep.distributed import World
from lockstep.generator import Engine, SharedWeights
from lockstep.graph import Runtime
from lockstep.graph.passes import keep_logits, recompute, saved_bytes
from lockstep.models import Decoder, PackedAttention
from lockstep.models.config import MLAConfig, MoEConfig
from lockstep.models.init import ARCHITECTURES, architecture, initialize
from lockstep.session.memory import Workload, adapt_config, available_memory, plan, terms
from lockstep.session.memory.terms import Recomputed
from lockstep.trainer import BatchShape, Trainer
from lockstep.trainer.packing import blank_batch
from lockstep.types import SampleIdentity, SamplingParams

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
    assert terms.shard(w) == 0 and terms.shard(w.with_settings("optimizer", offload=True)) == terms.masters(w) // 2 * (
        ranks > 1
    )
    assert terms.frozen(replace(w, frozen=[w.model])) == (2 * count if ranks == 1 else terms.masters(w) // 2)
    position = {"qwen3-0.6b": 28, "qwen3-8b": 36, "qwen3-14b": 40, "qwen3-32b": 64}[arch] * 8 * 256 * 2
    assert terms.cache(w, 4096) == (4096 + 16) * position


@pytest.mark.parametrize(("iterations", "parts", "quarters"), [(1, 1, 0), (2, 1, 4), (1, 4, 3), (2, 4, 4), (1, 2, 2)])
def test_supports_are_of_what_later_updates_read(iterations: int, parts: int, quarters: int) -> None:
    updates = {"num_iterations": iterations, "num_mini_batches": parts}
    w = workload("qwen3-0.6b", 8, max_tokens_per_micro_batch=1 << 20, **updates)
    quarter = 64 // 8 * 8 * 512 * 151936 // 8 // 4
    assert (
        terms.sampling_supports(w.with_settings("sampling", top_p=0.9)) == quarters * quarter
        and terms.sampling_supports(w) == 0
    )
    groups = 64 // 8 // parts  # of a micro-batch
    assert w.shape[:3] == (groups * (256 + 8 * 511), groups * 8 * 512, groups * 9)


@pytest.mark.parametrize("arch", KEPT_A_TOKEN)
def test_what_a_micro_batch_keeps(arch: str) -> None:
    w = workload(arch, 8)
    tokens, scored = w.shape.tokens, w.shape.completion_tokens
    assert tokens == 16384
    hidden = w.model.hidden_size
    ends = tokens * (2 * hidden + 512) + scored * (2 * hidden + 40)
    assert terms.activations(w) == tokens * KEPT_A_TOKEN[arch] + ends
    assert terms.activations(w, Recomputed(w.model.num_layers)) == tokens * w.model.num_layers * 2 * hidden + ends
    backward = 151936 * hidden * 2 + scored * hidden * 6 + terms.GRADIENT_CHUNK
    assert terms.head(w) >= backward and terms.logits(w) == scored * 151936 * 4
    assert terms.head(w, recomputed=False) == terms.logits(w) + backward + tokens * hidden * 2


@pytest.mark.parametrize("family", ["deepseek_v3", "olmo2", "gpt-oss"])
def test_a_trace_keeps_as_much(family: str) -> None:
    model, shape = FAMILIES.get(family) or architecture(f"tiny-{family}"), BatchShape(64, 48, 5, 40)
    w = replace(workload("tiny", 1), model=model)
    w.__dict__["shape"] = shape
    runtime = Runtime(CompileConfig("step", recompute=(LOGITS,)), torch.device("cpu"))
    trainer = Trainer(initialize(Decoder(model, torch.bfloat16), 0), OptimizerConfig(), LossConfig(), runtime=runtime)
    trainer.forward_backward(blank_batch(shape, SamplingParams(), True, model.moe is not None))
    (traced,) = trainer.programs.by_name["forward_backward"].cache.traces.values()
    statistics = 4 * model.num_heads * shape.tokens  # of attention's rows, which a CPU makes anew
    for recomputed in (
        Recomputed(*of) for of in itertools.product(range(model.num_layers + 1), (False, True), (False, True))
    ):
        found = adapt_config(w, replace(plan(w, H200), recomputed=recomputed)).compile
        graph = keep_logits(traced)[0] if found.keeps_logits else traced
        bytes_kept = saved_bytes(recompute(graph, found.recompute_patterns)[0] if found.recompute_patterns else graph)
        own = terms.activations(w, recomputed) - statistics * (model.num_layers - recomputed.layers)
        own += terms.logits(w) * (not recomputed.logits)
        assert own == pytest.approx(bytes_kept, rel=0.03), recomputed


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
    whole, recomputed = seen.sizes({place(tensor) for tensor in outside})
    return whole // TOKENS + 4 * decoder.heads[0], recomputed // TOKENS


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


def empty(count: int, dtype: torch.dtype, *more: int) -> Tensor:
    return torch.empty(count, *more, dtype=dtype, device="meta")


@pytest.mark.parametrize("arch", sorted(name for name in ARCHITECTURES if name.startswith("tiny")))
def test_each_family_keeps_what_its_layers_do_when_they_are_called_without_memory(arch: str) -> None:
    model = architecture(arch)
    rel = 0.01 if model.moe is None else 0.03  # the numbers of routes are left out
    w = replace(workload("tiny", 1), model=model)
    two = replace(w, config=replace(w.config, parallel=ParallelConfig(tp=2)), ranks=2)
    for of, decoder in (w, w.decoder), (two, Decoder(model, w.dtype, "meta", two.trainer_mesh)):
        for layer in range(model.num_layers):
            found = kept_by_layer(decoder, layer)
            assert [terms.layer_activations(of, layer, recomputed) for recomputed in (False, True)] == pytest.approx(
                found, rel=rel
            )


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


def test_every_axis_has_a_communicator_that_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found, buffers = [], []
    for settings in ({"cell": 64}, {"tp": 2}, {"tp": 2, "generator_tp": 4}, {"tp": 16}, {"cell": 4}):
        w = workload("qwen3-8b", 16)
        w = replace(w, config=replace(w.config, parallel=replace(w.config.parallel, batch_shards=0, **settings)))
        found.append([axis.size for axis in w.axes])
        talking = terms.communicators(w.axes)
        assert terms.context(w) == terms.CONTEXT + talking
        taken = (
            terms.CONTEXT_AT_START + talking + GIB - 5_000_000
        )  # by another process, or by buffers that nobody planned
        free, kept = H200 - taken, [GIB]  # one of the allocator's
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free, kept=kept: (free - sum(kept), H200))
        monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
        world = World(
            size=16, tp=w.tp, generator_tp=w.config.parallel.generator_tp, ranks_per_cell=w.cells.ranks_per_cell
        )
        assert available_memory(torch.device("cuda"), world) == H200 - GIB
        buffers.append(talking / GIB)
    assert found == [[16], [8, 2], [8, 2, 4], [16], [16, 4, 4]]
    eight, four, two, ring = 0.8 + 7 * 0.45, 0.8 + 3 * 0.45, 0.8 + 0.45, 0.8
    each = [eight, eight + two, eight + two + four, eight, ring + four + four]  # of sixteen in cells, no pair exchanges
    assert buffers == pytest.approx(each)
    w = workload("qwen3-8b", 1)
    assert terms.context(w) == terms.CONTEXT
    offloaded = w.with_settings("optimizer", offload=True).with_settings("checkpoint", interval=1)
    assert terms.context(offloaded) == terms.CONTEXT + 2 * 12 * w.layout.size // 512  # the state, and a copy


def test_constants_are_those_of_the_operators() -> None:
    backward = pytest.importorskip("lockstep.ops.logprobs.triton_backward")
    assert backward.CHUNK_BYTES == terms.GRADIENT_CHUNK
