"""Ranks that share the trainer's products: the generator's log-probabilities in every bit, one process's updates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import on_ranks
from small import FAMILIES, make_model
from torch import Tensor
from tp_cases import on_a_rank, trained

from lockstep.config import CompileConfig, LossConfig, OptimizerConfig, ParallelConfig, RunConfig, resolve_parallel
from lockstep.config.sections.compile import resolve_compile
from lockstep.distributed import Axis, Mesh, collectives, spread
from lockstep.distributed.parameter_parts import contiguous_runs, join_parts
from lockstep.errors import InputError
from lockstep.models import FolderWeights, ResidentWeights, load_part, save_model
from lockstep.models.checks import require_divisible
from lockstep.models.hf.export import Export
from lockstep.models.init import architecture
from lockstep.session.memory import Workload
from lockstep.trainer import Trainer
from lockstep.trainer.gathered import GatheredReference, flat_parameters, make_trained_model
from lockstep.trainer.parameters import FlatParameters, Layout

GROUPS = {"lr_scales": ("*=0.5", "*.o_proj=2", "model.norm=4"), "weight_decays": ("*norm=0.3", "*.mlp*=0.2")}
CASES: list[dict[str, Any]] = [
    {"family": "qwen3_moe", "router_aux_loss_coef": 0.01, "groups": GROUPS},
    {"family": "qwen3", "parts": True, "loss_type": "ppo"},
    {"family": "qwen3", "steps": 1, "mutant": "reversed"},
    {"family": "qwen3", "steps": 1, "mutant": "flipped"},
]
FROZEN = "model.layers.0", "model.embed_tokens"  # a layer of which each has its part, and the tied table
FOUR: list[dict[str, Any]] = [
    {"family": "llama", "steps": 2},
    {"family": "llama", "steps": 2, "graphs": True, "parts": True},
    {
        **{"family": "deepseek_v3", "steps": 2, "graphs": True, "parts": True, "beta": 0.1},
        "groups": {**GROUPS, "freeze": FROZEN},
    },
]


def named(case: dict[str, Any]) -> str:
    return " ".join("groups" if isinstance(value, dict) else str(value) for value in case.values())


@pytest.fixture(scope="module")
def two() -> dict[str, list[dict[str, Any]]]:
    """What each of two ranks found, by case; they share every product."""
    return found_by_case(2, CASES)


@pytest.fixture(scope="module")
def four() -> dict[str, list[dict[str, Any]]]:
    """What each of four ranks found, two shards times two that share products."""
    return found_by_case(4, FOUR)


def found_by_case(ranks: int, cases: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found = on_ranks(ranks, on_a_rank, 2, cases)
    return {named(case): [of_rank[i] for of_rank in found] for i, case in enumerate(cases)}


_known: dict[str, dict[str, Any]] = {}


def of_one_process(case: dict[str, Any]) -> dict[str, Any]:
    """What it finds, which is the same for cases that differ in what ranks do."""
    own = {name: value for name, value in case.items() if name not in ("graphs", "parts")}
    if named(own) not in _known:
        _known[named(own)] = trained(**own)
    return _known[named(own)]


def assert_one_process_agrees(case: dict[str, Any], ranks: list[dict[str, Any]], shards: int) -> None:
    torch.set_num_threads(1)
    one = of_one_process(case)
    for rank, found in enumerate(ranks):
        own = one["logprobs"][rank // 2 :: shards]
        assert len(found["logprobs"]) == len(own) > 0 and all(map(torch.equal, found["logprobs"], own))
        assert found["results"] == ranks[0]["results"]
        for (*known, checked, different), expected in zip(found["results"], one["results"], strict=True):
            *expected, checked_by_one, _ = expected
            assert known == pytest.approx(expected, rel=1e-5, abs=1e-7)
            assert known[0] and different == 0 and checked == checked_by_one
        for name, weight in one["weights"].items():
            assert torch.equal(found["weights"][name], ranks[0]["weights"][name])
            assert (found["weights"][name] - weight).norm() <= 1e-5 * weight.norm(), name
        assert found["again"].keys() <= one["weights"].keys() and len(found["again"]) >= 10
        assert all(torch.equal(again, found["weights"][name]) for name, again in found["again"].items())


@pytest.mark.parametrize("case", [case for case in CASES if "mutant" not in case], ids=named)
def test_two_ranks_that_share_products_train_as_one_process(two: Any, case: dict[str, Any]) -> None:
    assert_one_process_agrees(case, two[named(case)], shards=1)


@pytest.mark.parametrize("case", FOUR, ids=named)
def test_shards_of_ranks_that_share_products_train_as_one_process(four: Any, case: dict[str, Any]) -> None:
    """With graphs each rank's gradients are eager's, too."""
    assert_one_process_agrees(case, four[named(case)], shards=2)


def test_runs_of_one_layout_have_the_same_bits_captured_or_not(four: Any) -> None:
    eager, captured = (four[named(case)][0] for case in FOUR[:2])
    assert eager["results"] == captured["results"]
    for name in ("weights", "state"):
        assert all(torch.equal(x, captured[name][key]) for key, x in eager[name].items())


@pytest.mark.parametrize("case", [case for case in CASES if "mutant" in case], ids=named)
def test_words_in_another_order_or_one_wrong_bit_of_one_rank_stop_the_update_on_all(two: Any, case: Any) -> None:
    for found in two[named(case)]:
        applied, *_, checked, different = found["results"][0]
        assert not applied and (different > checked / 2 if case["mutant"] == "reversed" else different == 1)
        start = make_model(torch.float32, config=FAMILIES["qwen3"])
        assert all(torch.equal(p, found["weights"][name]) for name, p in start.named_parameters())


def test_columns_that_are_gathered_together_have_their_gradients_in_one_exchange(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two ranks that have the same, in bfloat16."""
    sent = list[Tensor]()

    def exchange(x: Tensor, size: int, axis: Axis) -> Tensor:
        sent.append(x)
        return x.reshape(axis.size, size)

    monkeypatch.setattr(collectives, "_gather_flat", lambda x, axis: torch.cat([x] * axis.size))
    monkeypatch.setattr(collectives, "all_to_all", exchange)
    draw = torch.Generator().manual_seed(0)
    pieces = [torch.randn(5, width, generator=draw).bfloat16().requires_grad_() for width in (6, 2, 3)]
    gathered = collectives.all_gather_columns(pieces, Axis("tp", 2))
    grads = [torch.randn(x.shape, generator=draw).bfloat16() for x in gathered]
    found = torch.autograd.grad(gathered, pieces, grads)
    for piece, whole, grad, own in zip(pieces, gathered, grads, found, strict=True):
        assert torch.equal(whole, torch.cat([piece, piece], dim=1)) and own.is_contiguous()
        assert torch.equal(own, sum(part.float() for part in grad.chunk(2, dim=1)).bfloat16())
    assert len(sent) == 1


def test_a_row_that_fills_a_share_up_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rows on two ranks: the second has two of them, and the last once more."""
    monkeypatch.setattr(spread, "all_gather", lambda x, axis: torch.stack([x, x]))
    own = torch.zeros(3, requires_grad=True)
    (numbers,) = spread.Spread(Axis("tp", 2, 1)).gather_scalars(5, own)
    numbers.backward(torch.arange(1.0, 6.0))
    assert own.grad is not None and own.grad.tolist() == [4, 5, 0]


def test_a_sum_over_ranks_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    of_ranks = torch.tensor([[256.0], [1.0], [1.0], [1.0]], dtype=torch.bfloat16)  # whose neighbours are 2 apart
    monkeypatch.setattr(collectives, "all_to_all", lambda x, size, axis: of_ranks)
    assert collectives.reduce_scatter_rows(of_ranks[:, 0], Axis("tp", 4, 0)).tolist() == [260]


def test_ranks_that_cannot_share_a_teacher_evenly_have_all_of_its_products() -> None:
    mesh = Mesh(fsdp=Axis("fsdp", 3, 1), tp=Axis("tp", 2, 1))
    configs = [replace(FAMILIES["qwen3"], num_kv_heads=count) for count in (2, 1)]
    models = [make_model(torch.float32, config=config) for config in configs]
    shared, alone = (GatheredReference(model, mesh) for model in models)
    assert (shared.model.spread.axis.size, alone.model.spread.axis.size) == (2, 1)
    assert alone.weights.layout == Layout.of([p.shape for p in models[1].parameters()], 3)
    parallel = ParallelConfig(fsdp=3, tp=2)
    for reference in (shared, alone):
        w = Workload(configs[0], RunConfig(parallel=parallel), 6, torch.float32, frozen=[reference.model.config])
        assert w.frozen_parameters == reference.weights.layout.size
        ResidentWeights(models[reference is alone]).fill(reference.own_ranges())
        assert any(part.any() for part in reference.weights.parts)


def test_what_they_saved_one_process_goes_on_with(two: Any) -> None:
    found = two[named(CASES[0])][0]
    trainer = Trainer(make_model(torch.float32, 1, FAMILIES["qwen3_moe"]), OptimizerConfig(), LossConfig())
    trainer.load_state(found["state"], {"weights_version": 3})
    assert all(torch.equal(p, found["weights"][name]) for name, p in trainer.model.named_parameters())


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_every_layout_reads_what_another_wrote(family: str, tmp_path: Path) -> None:
    """One process, three, and two times two that share products; these export the bytes of one."""
    model = make_model(torch.float32, config=FAMILIES[family])
    one = FlatParameters(make_model(torch.float32, config=FAMILIES[family]))
    three = [flat_parameters(model, Mesh(Axis("fsdp", 3, rank))) for rank in range(3)]
    meshes = [Mesh(Axis("fsdp", 2, shard), tp=Axis("tp", 2, place)) for shard in range(2) for place in range(2)]
    trained = [make_trained_model(model, mesh) for mesh in meshes]
    four = [flat_parameters(*both, (), model) for both in zip(trained, meshes, strict=True)]
    save_model(model, tmp_path / "one")
    for flat, part in zip(four, trained, strict=True):
        assert all(p.untyped_storage().nbytes() <= 4 for p in part.parameters())
        FolderWeights(tmp_path / "one").fill(flat.own_ranges())
    for flat in (one, *three, *four):
        expected = flat.data.clone()
        assert int(expected.count_nonzero()) > 0 and (flat is one or expected.numel() < one.data.numel() / 2)
        for flats, tp in (([one], 1), (three, 1), (four, 2)):
            buffers = [other.data.clone() if other is not flat else expected for other in flats]
            flat.data.fill_(7)
            flat.load_parts(flat.data, buffers, tp)
            assert torch.equal(flat.data, expected)
    exports = [Export(model, tmp_path / "four") for _ in four]
    exports[0].create_files()
    for export, flat, part in zip(exports, four, trained, strict=True):
        export.write(flat.ranges_to_write(part))
    for export in exports:
        export.convert_layouts()
    first, second = (tmp_path / name / "model.safetensors" for name in ("one", "four"))
    assert first.read_bytes() == second.read_bytes()
    on_tp = [Mesh(tp=Axis("tp", 2, rank)) for rank in range(2)]
    parts = [dict(load_part(ResidentWeights(model), torch.float32, "cpu", mesh).named_parameters()) for mesh in on_tp]
    for name, whole in model.named_parameters():
        on, own = model.placements[name], [part[name].detach() for part in parts]
        assert torch.equal(whole, own[0] if on.tp is None else join_parts(on, own))
        pieces = list(contiguous_runs(on, Mesh(tp=Axis("tp", 2, 1)), tuple(whole.shape)))
        flat_parts = [whole.detach().flatten()[there : there + count] for _, there, count in pieces]
        assert torch.equal(torch.cat(flat_parts), own[1].flatten())


def test_degrees_that_a_model_cannot_be_shared_at_are_refused() -> None:
    with pytest.raises(InputError, match=r"parallel\.tp is 4, .* num_key_value_heads 2; use 1 or 2"):
        require_divisible(architecture("tiny"), 4, "parallel.tp")
    require_divisible(architecture("tiny-deepseek-v3"), 4, "parallel.tp")
    with pytest.raises(
        InputError, match=r"parallel\.zero_stage is 2 and parallel\.tp 2: .*; leave parallel\.zero_stage out"
    ):
        ParallelConfig(tp=2, zero_stage=2).check()
    config = RunConfig(parallel=ParallelConfig(tp=4), compile=resolve_compile(CompileConfig(), False))
    with pytest.raises(InputError, match=r"parallel\.tp is 4, and there are 6 processes: start a multiple of 4"):
        resolve_parallel(config, 6)
