"""Fused backward calls: which ones a GPU's train step gets, that they are wired as the separate ones were, and what is
left alone. The step is traced here as if for a GPU; `tests/gpu` holds the kernels to each other's bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from small import CONFIG, completed, make_model, train_group
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep import ops
from lockstep.config import CompileConfig, LossConfig, OptimizerConfig
from lockstep.distributed.collectives import all_gather_columns
from lockstep.distributed.mesh import Axis
from lockstep.distributed.push import operator as push
from lockstep.graph import Captured, Inputs, Runtime, capture, pipeline, run_passes
from lockstep.graph.ir.captured import op_name
from lockstep.models import ModelConfig
from lockstep.ops.attention.operator import attention_packed_backward
from lockstep.ops.linear import operator as linear_operator
from lockstep.ops.norm import operator as norm_operator
from lockstep.ops.operator import enable_autograd
from lockstep.ops.records import AttentionGradient
from lockstep.ops.rope import operator as rope_operator
from lockstep.trainer import Trainer, pack
from lockstep.trainer.programs import statics_of
from lockstep.types import PackedBatch, SamplingParams

SEPARATE = ("lockstep.attention_packed_backward", "lockstep.qk_norm_rope_backward", "lockstep.rms_norm_backward")


def by_autograd(function, leaves: list[Tensor | None], grad: Tensor) -> list[Tensor]:
    own = [x.detach().requires_grad_() for x in leaves if x is not None]
    with enable_autograd():
        return list(torch.autograd.grad(function(*own), own, grad))


def rms_norm(grad: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, ...]:
    return tuple(by_autograd(lambda x, w: norm_operator.rms_norm(x, w, eps, offset), [x, weight], grad))


def qk_norm_rope(grad: Tensor, qkv: Tensor, q_weight, k_weight, *others: Any) -> tuple[Tensor, ...]:
    def function(qkv: Tensor, *weights: Tensor) -> Tensor:
        by = ops.Rotation(*(weights or (None, None)), *others[:4])
        return rope_operator.qk_norm_rope(qkv, by, *others[4:])

    found = by_autograd(function, [qkv, q_weight, k_weight], grad)
    return tuple(found) if len(found) == 3 else (found[0], qkv.new_empty(0), qkv.new_empty(0))


def gather_rows(grad: Tensor, rows: Tensor, table_rows: int) -> Tensor:
    return by_autograd(lambda table: ops.gather_rows(table, rows), [grad.new_zeros(table_rows, grad.shape[1])], grad)[0]


def rms_norm_add(grad: Tensor, x: Tensor, weight: Tensor, eps: float, other: Tensor, *offset: float):
    grad_x, grad_weight = rms_norm(grad, x, weight, eps, *offset)
    return other + grad_x, grad_weight


def rotated_attention(*args: Any) -> tuple[Tensor, ...]:
    dq, dk, dv = attention_packed_backward(AttentionGradient(*args[:6]), ops.Packed(*args[6:10]))
    scores, offset = args[17:21], args[21:]
    assert scores in ((), tuple(ops.PLAIN))
    grad_qkv, *weights = qk_norm_rope(torch.cat((dq, dk), 1), *args[10:17], *offset)
    grad_qkv[:, -dv[0].numel() :] += dv.flatten(1)
    return (grad_qkv, *weights)


def add_gathered_rows(total: Tensor, grad: Tensor, rows: Tensor) -> Tensor:
    return total.add_(gather_rows(grad, rows, total.shape[0]))


class AsOnGpu(TorchDispatchMode):
    """A GPU's own operators in plain torch."""

    implementations = {
        "rms_norm_backward": rms_norm,
        "qk_norm_rope_backward": qk_norm_rope,
        "gather_rows_backward": gather_rows,
        "rms_norm_backward_add": rms_norm_add,
        "rotated_attention_packed_backward": rotated_attention,
        "add_gathered_rows": add_gathered_rows,
        "add_gradient": Tensor.add_,
    }

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op._schema.name.partition("::")[2]
        own = self.implementations.get(name) if op.namespace == "lockstep" else None
        found = own(*args) if own else op(*args, **(kwargs or {}))
        return found if op._schema.returns else None


def batch() -> PackedBatch:
    torch.manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(0, 256, (count,)).tolist()

    sequences = [completed(ids(5 + i), 1.0 - i, 0.1, [-1.0] * (5 + i), [-1.0] * (5 + i)) for i in range(3)]
    groups = [train_group(ids(7), sequences, SamplingParams(temperature=0.8)) for _ in range(2)]
    return next(iter(pack(groups, max_tokens=512, check_parity=False)))


def traced(config: ModelConfig, joint: bool = False) -> tuple[Captured, Inputs]:
    """A train step as a GPU gets it, and its inputs, which lie on a CPU."""
    runtime = Runtime(CompileConfig("joint" if joint else "step", cudagraph_mode="none"), torch.device("cpu"))
    model = make_model(torch.bfloat16, config=config, scale=2.0)
    trainer = Trainer(model, OptimizerConfig(), LossConfig(), enforce_parity=False, runtime=runtime)
    function = trainer.programs.by_name["forward_backward"]
    tokens = batch()
    statics = {**statics_of(tokens), "loss_type": "grpo", "with_support": False}
    with mock.patch.object(FakeTensor, "is_cuda", True), mock.patch.object(FunctionalTensor, "is_cuda", True):
        graph = function.graph(tokens.tensors(), statics)
    return graph.captured, replace(function.inputs, user=tokens.tensors())


def calls(captured: Captured) -> Counter[str]:
    return Counter(op_name(node) for node in captured.graph.nodes)


def gradients(captured: Captured, inputs: Inputs) -> list[Tensor]:
    for grad in inputs.grad.values():
        grad.zero_()
    with torch.no_grad(), AsOnGpu():
        captured.module.forward(*(tensor for _, _, tensor in inputs.flat()))
    return [grad.clone() for grad in inputs.grad.values()]


@pytest.mark.parametrize(
    ("joint", "tied", "norms"), [(False, True, True), (False, False, False), (True, True, False), (True, False, True)]
)
def test_a_train_step(joint: bool, tied: bool, norms: bool) -> None:
    config = replace(CONFIG, tie_word_embeddings=tied, family="qwen3" if norms else "llama")
    before, inputs = traced(config, joint)
    after = run_passes(before, pipeline(CompileConfig(canonicalize=False), on_gpu=True))
    have, layers = calls(after), config.num_layers
    assert have["lockstep.rotated_attention_packed_backward"] == layers
    assert have["lockstep.rms_norm_backward_add"] == 2 * layers
    assert have["lockstep.rms_norm_backward"] == 1, "the last norm's is the stream's only gradient"
    assert have["lockstep.add_gathered_rows"] == tied and have["lockstep.gather_rows_backward"] == 2 - tied
    assert have["lockstep.add_gradient"] == len(inputs.grad)
    assert not have["aten.cat"] and not have["aten.slice_backward"]
    assert not any(have[name] for name in SEPARATE[:2])
    found, expected = gradients(after, inputs), gradients(before, inputs)
    assert all(map(torch.equal, found, expected)) and all(grad.any() for grad in found)


def test_norms_with_an_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes with the calls that are put together."""
    monkeypatch.setattr(ops, "rms_norm", lambda x, w, eps, _=0.0: norm_operator.rms_norm(x, w, eps, 1.0))
    monkeypatch.setattr(
        ops, "norm_linear", lambda x, n, w, eps, b=None, _=0.0: linear_operator.norm_linear(x, n, w, eps, b, 1.0)
    )
    monkeypatch.setattr(ops, "qk_norm_rope", lambda qkv, by, _=0.0: rope_operator.qk_norm_rope(qkv, by, 1.0))
    before, inputs = traced(CONFIG)
    after = run_passes(before, pipeline(CompileConfig(), on_gpu=True))
    have = calls(after)
    assert have["lockstep.rotated_attention_packed_backward"] == CONFIG.num_layers
    assert have["lockstep.rms_norm_backward_add"] == 2 * CONFIG.num_layers
    found, expected = gradients(after, inputs), gradients(before, inputs)
    assert all(map(torch.equal, found, expected)) and all(grad.any() for grad in found)
    monkeypatch.undo()
    plain, inputs = traced(CONFIG)
    assert not all(map(torch.equal, found, gradients(plain, inputs)))


def test_totals_that_are_read_or_added_to_twice_stay_in_place() -> None:
    def body(t: Inputs) -> dict[str, Tensor]:
        for name in ("twice", "read", "once"):
            t.grad[name].add_(t.user["x"].cos())
        t.grad["twice"].add_(t.user["x"].sin())
        return {"read": t.grad["read"] * 2}

    grads = {name: torch.zeros(8) for name in ("twice", "read", "once")}
    captured = capture("sum", body, Inputs(grad=grads, user={"x": torch.randn(8).bfloat16()}), writes={"grad"})
    have = calls(run_passes(captured, pipeline(CompileConfig(), on_gpu=True)))
    assert have["lockstep.add_gradient"] == 1 and have["aten.add_"] == 3


def test_a_gradient_is_added_as_it_is_where_it_was_added() -> None:
    """Whatever writes it through a view, before or after."""

    def body(t: Inputs) -> dict[str, Tensor]:
        before, through_base, after = (t.user["x"] * number for number in (2, 3, 4))
        before.view(2, 4).view(-1).mul_(3)
        view = through_base.view(2, 4)
        through_base[:4].mul_(3)
        totals = t.grad["before"], t.grad["base"], t.grad["after"]
        for total, grad in zip(totals, (before, view, after), strict=True):
            total.add_(grad)
        after.mul_(3)
        return {"after": after[:1] + 1}

    grads = {"before": torch.zeros(8), "base": torch.zeros(2, 4), "after": torch.zeros(8)}
    inputs = Inputs(grad=grads, user={"x": torch.randn(8).bfloat16()})
    before = capture("sum", body, inputs, writes={"grad"})
    after = run_passes(before, pipeline(CompileConfig(), on_gpu=True))
    assert calls(after)["lockstep.add_gradient"] == 3
    assert all(map(torch.equal, gradients(after, inputs), gradients(before, inputs)))


def alike(x: Tensor, ranks: int, group: str, to_owners: bool) -> Tensor:
    """A collective of ranks that all have the same."""
    return x[: len(x) // ranks if to_owners else None].repeat(1, ranks)


def pushed_attention(t: Inputs) -> dict[str, Tensor]:
    """Two heads of three sequences, pushed; and once more, read as heads beside that."""
    axis, x = Axis("tp", 2, 1, pushes=True), t.user["x"]
    rotation = ops.Rotation(None, None, t.user["table"], 2, 1, 1e-6)
    cache, contexts = ops.KVPages(t.kv["k"], t.kv["v"]), ops.Contexts(t.user["pages"], t.user["lengths"], 16)
    heads = [ops.attention_decode(x * (1 + i), rotation, cache, t.user["slots"], contexts) for i in range(2)]
    flat = [head.flatten(1) for head in heads]
    pushed = [all_gather_columns((part,), axis)[0] for part in flat]
    return {"first": pushed[0], "second": pushed[1], "own": flat[1] * 2}


def attended() -> Inputs:
    """New inputs of attention, the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    random = {name: torch.randn(shape, generator=generator) for name, shape in (("x", (3, 32)), ("table", (3, 8)))}
    pages, lengths = torch.arange(3, dtype=torch.int32).view(3, 1), torch.tensor([3, 1, 5], dtype=torch.int32)
    user = random | {"pages": pages, "lengths": lengths, "slots": pages.flatten().long() * 16 + lengths - 1}
    return Inputs(user=user, kv={name: torch.randn(3, 16, 1, 8, generator=generator) for name in "kv"})


def test_attention_and_the_push_of_its_heads_become_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "by_collective", alike)
    before = capture("attention", pushed_attention, attended(), writes={"kv"})
    after = run_passes(before, pipeline(CompileConfig(), sharded=True, on_gpu=True))
    assert calls(after)["lockstep.push_attention_decode"] == 1 == calls(after)["lockstep.push_columns"]
    assert calls(after)["lockstep.attention_decode"] == 1
    given = attended(), attended()
    results = [
        graph.module.forward(*(tensor for _, _, tensor in own.flat()))
        for graph, own in zip((before, after), given, strict=True)
    ]
    assert len(results[0]) == 3 and all(map(torch.equal, *results))
    assert all(torch.equal(given[0].kv[name], given[1].kv[name]) for name in "kv")


def pushed_products(t: Inputs) -> dict[str, Tensor]:
    """A layer's products that two ranks share, of which each pushes its columns; one push goes to the rows' owners."""
    axis, p, x = Axis("tp", 2, 1, pushes=True), t.param, t.user["x"]
    gated = ops.norm_gate_up(x, p["norm"], p["gate_up"], 1e-6, 1.0, "gelu_tanh")
    own = ops.linear_add(all_gather_columns((gated,), axis)[0], p["down"], x[:, :4], p["bias"])
    (whole,) = all_gather_columns((own,), axis)
    plain = all_gather_columns((ops.gate_up(whole, p["gate_up"]),), axis)[0]
    owners = push.push_columns(ops.linear_add(x, p["square"], x), axis.size, axis.group, True)
    return {"own": own * 2, "plain": plain, "owners": owners}


def test_a_product_and_the_push_of_its_columns_become_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "by_collective", alike)
    generator = torch.Generator().manual_seed(0)
    shapes = {"norm": (8,), "gate_up": (24, 8), "down": (4, 24), "bias": (4,), "square": (8, 8)}
    parameters = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    inputs = Inputs(param=parameters, user={"x": torch.randn(6, 8, generator=generator)})
    with torch.no_grad():
        before = capture("pushed", pushed_products, inputs)
        after = run_passes(before, pipeline(CompileConfig(), sharded=True, on_gpu=True))
        assert (calls(before)["lockstep.push_columns"], calls(after)["lockstep.push_columns"]) == (4, 1)
        assert (calls(after)["lockstep.push_linear_add"], calls(after)["lockstep.push_gate_up"]) == (1, 2)
        assert calls(after)["lockstep.rms_norm"] == 1 and not calls(after)["lockstep.norm_gate_up"]
        assert "3 pushes with what they push" in after.log[-1]
        found = [graph.module.forward(*(tensor for _, _, tensor in inputs.flat())) for graph in (before, after)]
    assert len(found[0]) == len(found[1]) == 3 and all(map(torch.equal, *found))


def fused(function: Callable[[Inputs], dict[str, Tensor]], inputs: Inputs) -> tuple[Captured, list[Any]]:
    """The graph of a function of ranks after the passes of a GPU; its results before and after them."""
    with torch.no_grad():
        before = capture("shared", function, inputs)
        after = run_passes(before, pipeline(CompileConfig(), sharded=True, on_gpu=True))
        found = [graph.module.forward(*(tensor for _, _, tensor in inputs.flat())) for graph in (before, after)]
    return after, found


def normed_products(t: Inputs) -> dict[str, Tensor]:
    """Products that two ranks share, of which norms read all columns: alone, of a product, of one that is pushed."""
    axis, p, x, own = Axis("tp", 2, 1, pushes=True), t.param, t.user["x"], t.user["x"][:, :4]

    def added(own: Tensor) -> tuple[Tensor, Tensor]:
        own = ops.linear_add(x, p["square"], own)
        return own, all_gather_columns((own,), axis)[0]

    own, whole = added(own)
    qkv = ops.norm_linear(whole, p["norm"], p["qkv"], 1e-5, p["bias"], 1.0)
    own, whole = added(own)
    plain = ops.norm_linear(whole, p["norm"], p["qkv"], 1e-6)
    own, whole = added(own)
    own_gated = ops.norm_gate_up(whole, p["norm"], p["gate_up"], 1e-6, 1.0, "gelu_tanh")
    gated = all_gather_columns((own_gated,), axis)[0]
    own, whole = added(own)
    sums = ops.rms_norm(whole, p["norm"], 1e-6).sum(1)
    return {"own": own * 2, "qkv": qkv, "plain": plain, "gated": gated, "sums": sums}


def parameters_of_norms() -> Inputs:
    generator = torch.Generator().manual_seed(0)
    shapes = {"norm": (8,), "qkv": (6, 8), "gate_up": (24, 8), "bias": (6,), "square": (4, 8)}
    parameters = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return Inputs(param=parameters, user={"x": torch.randn(6, 8, generator=generator)})


def test_a_norm_that_alone_reads_what_was_pushed_becomes_a_part_of_that_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "by_collective", alike)
    inputs = parameters_of_norms()
    after, found = fused(normed_products, inputs)
    assert calls(after)["lockstep.push_linear_add_norm"] == 4 and calls(after)["lockstep.normed_linear"] == 2
    assert not calls(after).keys() & {"lockstep.push_linear_add", "lockstep.rms_norm", "lockstep.norm_linear"}
    assert "5 pushes with what they push, 4 norms with what they read" in after.log[-1]
    assert len(found[0]) == len(found[1]) == 5 and all(map(torch.equal, *found))


def other_norms(t: Inputs) -> dict[str, Tensor]:
    """A norm beside another reader; of a product with a bias; with weights that are written, or computed."""
    axis, p, x, own, found = Axis("tp", 2, 1, pushes=True), t.param, t.user["x"], t.user["x"][:, :4], []
    scale = p["norm"] + 1
    for bias in (None, p["bias"][:4], None, None):
        own = ops.linear_add(x, p["square"], own, bias)
        whole = all_gather_columns((own,), axis)[0]
        if len(found) == 2:
            scale.mul_(2)
        weights = p["norm"], p["norm"], scale, p["norm"] * 2
        found.append(ops.rms_norm(whole, weights[len(found)], 1e-6))
        if len(found) == 1:
            found[0] = found[0] + whole
    return {str(i): x for i, x in enumerate(found)}


def test_other_norms_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "by_collective", alike)
    inputs = parameters_of_norms()
    after, found = fused(other_norms, inputs)
    assert (calls(after)["lockstep.push_linear_add"], calls(after)["lockstep.rms_norm"]) == (4, 4)
    assert len(found[0]) == len(found[1]) == 4 and all(map(torch.equal, *found))


def norms_of_views(t: Inputs) -> dict[str, Tensor]:
    """Norms whose weights are views of what is written."""
    axis, p, x, own, found = Axis("tp", 2, 1, pushes=True), t.param, t.user["x"], t.user["x"][:, :4], []
    scales = torch.stack((p["norm"], p["norm"]))
    first, second, again = scales.view(-1)[:8], scales[1], scales[1]
    for written, weight in ((scales, first), (scales, second), (again, second)):
        own = ops.linear_add(x, p["square"], own)
        whole = all_gather_columns((own,), axis)[0]
        written.mul_(2)
        found.append(ops.norm_linear(whole, weight, p["qkv"], 1e-6))
    return {str(i): x for i, x in enumerate(found)}


def norm_of_a_weight(t: Inputs) -> dict[str, Tensor]:
    """A product of the normed columns and the columns."""
    axis, p, x = Axis("tp", 2, 1, pushes=True), t.param, t.user["x"]
    whole = all_gather_columns((ops.linear_add(x, p["square"], x[:, :4]),), axis)[0]
    return {"products": ops.norm_linear(whole, p["norm"], whole, 1e-6)}


@pytest.mark.parametrize("function", [norms_of_views, norm_of_a_weight])
def test_a_norm_stays_behind_what_it_follows(monkeypatch: pytest.MonkeyPatch, function) -> None:
    monkeypatch.setattr(push, "by_collective", alike)
    inputs = parameters_of_norms()
    after, found = fused(function, inputs)
    assert all(map(torch.equal, *found)) and not calls(after)["lockstep.push_linear_add_norm"]


def norms_beside_parts(t: Inputs) -> dict[str, Tensor]:
    """Norms of products of a part of the ranks' columns; one of them is written."""
    axis, p, x = Axis("tp", 2, 1, pushes=True), t.param, t.user["x"]
    whole = all_gather_columns((ops.linear_add(x, p["square"], x[:, :4]),), axis)[0]
    part, scale = whole[:, :4], p["norm"] + 1
    own = ops.linear_add(part, p["square"][:, :4].contiguous(), part)
    beside = ops.rms_norm(all_gather_columns((own,), axis)[0], scale, 1e-6)
    own = ops.linear_add(part, p["square"][:, :4].contiguous(), part)
    added = ops.rms_norm(all_gather_columns((own,), axis)[0], p["norm"], 1e-6) + ops.linear(x, p["gate_up"][:8])
    own = ops.linear_add(x, p["square"], x[:, :4])
    written = ops.rms_norm(all_gather_columns((own,), axis)[0], p["norm"], 1e-6)
    written.copy_(whole)
    return {"logprob_C": beside.amax(1) * added.amax(1) * own.sum(1), "written": written}


def test_what_the_norms_of_parts_become_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "by_collective", alike)
    inputs = parameters_of_norms()
    after, found = fused(norms_beside_parts, inputs)
    assert all(map(torch.equal, *found)) and calls(after)["lockstep.push_linear_add_norm"] == 1


def written_products(t: Inputs) -> dict[str, Tensor]:
    """Products that are written after they are computed: through a view before their push, or after it."""
    axis, x = Axis("tp", 2, 1, pushes=True), t.user["x"]
    first, second = (ops.linear_add(x, t.param["square"], x) for _ in range(2))
    first[:, :2].mul_(3)
    pushed = [all_gather_columns((own,), axis)[0] for own in (first, second)]
    second.copy_(pushed[1][:, :8])
    third = all_gather_columns((ops.linear_add(x, t.param["square"], x),), axis)[0]
    third.copy_(pushed[0])
    sums = pushed[1].view(8, 2, 4, 2).sum(3).flatten(1)  # of what each rank has
    return {"first": pushed[0], "second": second * 2, "third": third, "logprob_C": sums}


def test_a_product_that_is_written_keeps_its_push(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "by_collective", alike)
    generator = torch.Generator().manual_seed(0)
    x, square = torch.randn(2, 8, 8, generator=generator)
    inputs = Inputs(param={"square": square}, user={"x": x})
    after, found = fused(written_products, inputs)
    assert calls(after)["lockstep.push_columns"] == 3
    assert len(found[0]) == 4 and all(map(torch.equal, *found))


def pushed_in_another_order(t: Inputs) -> dict[str, Tensor]:
    """Two products, of which the second is pushed first; and two that are pushed in their order."""
    axis, x, pushed = Axis("tp", 2, 1, pushes=True), t.user["x"], dict[str, Tensor]()
    for order in ((1, 0), (2, 3)):
        own = {i: ops.linear_add(x * (1 + i), t.param["square"], x) for i in sorted(order)}
        pushed |= {str(i): all_gather_columns((own[i],), axis)[0] for i in order}
    return pushed


def test_pushes_stay_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that runs the graph and one that calls eagerly push the same, launch by launch."""
    moved = list[Tensor]()
    monkeypatch.setattr(push, "by_collective", lambda x, *about: moved.append(x) or alike(x, *about))
    generator = torch.Generator().manual_seed(0)
    x, square = torch.randn(2, 8, 8, generator=generator)
    inputs = Inputs(param={"square": square}, user={"x": x})
    with torch.no_grad():
        before = capture("ordered", pushed_in_another_order, inputs)
        after = run_passes(before, pipeline(CompileConfig(), sharded=True, on_gpu=True))
        for graph in (before, after):
            graph.module.forward(*(tensor for _, _, tensor in inputs.flat()))
    assert calls(after)["lockstep.push_linear_add"] == 3 and all(map(torch.equal, moved[:4], moved[4:]))


def biased_product(t: Inputs) -> dict[str, Tensor]:
    own = ops.linear_add(t.user["x"], t.param["square"], t.user["x"], t.param["bias"])
    return {"pushed": push.push_columns(own, 2, "@tp", False)}


@pytest.mark.parametrize(("call", "argument"), [("linear_add", "bias_N"), ("push_columns", "to_owners")])
def test_calls_with_keywords_that_a_users_pass_made_are_kept(
    call: str, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push, "by_collective", alike)
    generator = torch.Generator().manual_seed(0)
    x, square = torch.randn(2, 8, 8, generator=generator)
    inputs = Inputs(param={"square": square, "bias": x[0] * 2}, user={"x": x})
    with torch.no_grad():
        before = capture("biased", biased_product, inputs)
        for node in before.graph.nodes:
            if op_name(node) == f"lockstep.{call}":
                node.args, node.kwargs = node.args[:3], {argument: node.args[3]}
        before.module.recompile()
        after = run_passes(before, pipeline(CompileConfig(), sharded=True, on_gpu=True))
        found = [graph.module.forward(*(tensor for _, _, tensor in inputs.flat())) for graph in (before, after)]
    assert calls(after)[f"lockstep.{call}"] == 1 and torch.equal(*(pushed for (pushed,) in found))


def heads_as_rows(t: Inputs) -> dict[str, Tensor]:
    """Two heads of three sequences: pushed as six rows."""
    rotation = ops.Rotation(None, None, t.user["table"], 2, 1, 1e-6)
    cache, contexts = ops.KVPages(t.kv["k"], t.kv["v"]), ops.Contexts(t.user["pages"], t.user["lengths"], 16)
    heads = ops.attention_decode(t.user["x"], rotation, cache, t.user["slots"], contexts)
    return {"pushed": all_gather_columns((heads.view(6, 8),), Axis("tp", 2, 1, pushes=True))[0]}


def test_heads_that_are_pushed_as_rows_keep_their_push(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "by_collective", alike)
    before = capture("rows", heads_as_rows, attended(), writes={"kv"})
    after = run_passes(before, pipeline(CompileConfig(), sharded=True, on_gpu=True))
    (pushed,) = after.module.forward(*(tensor for _, _, tensor in attended().flat()))
    assert pushed.shape == (6, 16) and calls(after)["lockstep.push_columns"] == 1


def test_a_cpu_keeps_its_graphs() -> None:
    assert "fuse" not in [p.name for p in Runtime(CompileConfig("step"), torch.device("cpu")).builder.passes]
    cuda = Runtime(CompileConfig("step", cudagraph_mode="none"), torch.device("cuda"))
    assert "fuse" in [p.name for p in cuda.builder.passes]
