"""The verifier refuses each planted fault and names the node."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep import ops
from lockstep.distributed.push.operator import push_columns, push_linear_add
from lockstep.graph import GraphError, GraphLauncher, Inputs, backward, capture, verify

TABLE = torch.randn(4, 4)  # a module's global: no closure gives it away


@torch.library.custom_op("lockstep_test::on_the_host", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def on_the_host(x: Tensor) -> Tensor:
    """An operator whose author knows that it cannot be recorded."""
    return x * float(x.sum())


@on_the_host.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def inputs() -> Inputs:
    x = torch.randn(4, 4)
    return Inputs(
        param={"w": torch.nn.Parameter(torch.randn(4, 4))},
        grad={"g": torch.zeros(4, 4)},
        kv={"k": torch.zeros(4, 4)},
        user={"x": x, "mask": x[0] > 0},
    )


def captured(body, **options):
    return capture("f", body, inputs(), **options)


def write_to_a_view_of_the_cache(t: Inputs) -> dict[str, Tensor]:
    t.kv["k"].t()[1:].zero_()
    return {}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda t: {"y": t.user["x"] + TABLE}, r"node _tensor_constant0 .* used by add: a tensor from outside"),
        (lambda t: {"y": t.user["x"] * torch.tensor(2.0)}, "a tensor from outside became a constant"),
        (lambda t: {"y": t.user["x"] @ t.param["w"]}, r"node mm \(aten.mm\): the forward pass must use ops.linear"),
        (lambda t: {"y": t.user["x"].softmax(0)}, r"\(aten._softmax\): .* must use ops.attention"),
        (lambda t: {"y": t.user["x"].log_softmax(0)}, r"must use ops.token_logprobs"),
        (lambda t: {"y": t.user["x"].mean(0)}, r"\(aten.mean\): .* must use ops.rms_norm"),
        (lambda t: {"y": torch._safe_softmax(t.user["x"], 0)}, r"\(aten._safe_softmax\): .* must use ops.attention"),
        (lambda t: {"y": F.rms_norm(t.user["x"], (4,))}, r"must use ops.rms_norm"),
        (lambda t: {"y": F.scaled_dot_product_attention(*[t.user["x"][None, None]] * 3)}, r"must use ops.attention"),
        (write_to_a_view_of_the_cache, r"node zero_ \(aten.zero_\) writes kv 'k' in place; roles it may write: grad"),
        (lambda t: {"y": t.param["w"].add_(1) * 2}, r"node add_ .* writes param 'w' in place"),
        (lambda t: {"y": TABLE.add_(t.user["x"])}, r"node add_ .* writes the constant _tensor_constant0"),
        (lambda t: {"y": t.user["x"].t()}, r"output 'y' is node t, a view of an input"),
        (lambda t: {"y": 3}, r"output 'y' is 3; an output must be a tensor"),
    ],
)
def test_a_planted_fault_is_named(body, message: str) -> None:
    with pytest.raises(GraphError, match=rf"(?s)f\(\): the captured graph is refused\n  .*{message}"):
        verify(captured(body, writes={"grad"}))


COLLECTIVES = torch.ops._c10d_functional


def gathered(x: Tensor) -> Tensor:
    """Of two ranks, [2, *x.shape], by rank."""
    return COLLECTIVES.wait_tensor(COLLECTIVES.all_gather_into_tensor(x[None] * 2, 2, "@tp"))


def exchanged(x: Tensor) -> Tensor:
    return COLLECTIVES.wait_tensor(COLLECTIVES.all_to_all_single((x * 2).flatten(), [8, 8], [8, 8], "@tp")).view(2, 8)


def columns(x: Tensor) -> Tensor:
    return torch.cat(gathered(x[:, ::2]).unbind(), dim=1)


def pushed(x: Tensor) -> Tensor:
    return push_columns(x * 2, 2, "@tp", False)


def pushed_product(x: Tensor) -> tuple[Tensor, Tensor]:
    return push_linear_add(x * 2, torch.ones_like(x), x, 2, "@tp")


def pieces(x: Tensor) -> list[Tensor]:
    return [piece.flatten(1) for piece in x.unflatten(1, (2, 4)).split(2, dim=2)]


def in_turn(x: Tensor) -> Tensor:
    first, second = gathered(x)
    return first + second


def in_memory(x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for part in gathered(x):
        total.add_(part)
    return total


def products(x: Tensor) -> Tensor:
    first, second = gathered(x).unbind()
    return ops.linear_add(first, torch.ones_like(x), second)


def split_product(x: Tensor) -> Tensor:
    """A product of which each rank sums over a part of the depth."""
    return gathered(ops.linear(x[:, :2], torch.ones_like(x)[:, :2])).sum(0)


def split_experts(x: Tensor) -> Tensor:
    """Tokens' experts, of which each rank adds up its own."""
    rows = torch.zeros(4, 1, dtype=torch.int64, device=x.device)
    first, second = gathered(ops.combine(x, rows, x[:, :1]))
    return first + second


# Floats added across ranks, each [4, 4] of a rank's partial sums of this shape.
ADDED = {
    "all_reduce": lambda x: COLLECTIVES.wait_tensor(COLLECTIVES.all_reduce(x, "sum", "@tp")),
    "sum": lambda x: gathered(x).sum(0),
    "K split": split_product,
    "experts": split_experts,
    "mean": lambda x: gathered(x).transpose(0, 2).mean(2).t().contiguous(),  # another dimension
    "cumsum": lambda x: gathered(x).cumsum(0)[1],
    "add": in_turn,
    "add_": in_memory,
    "linear_add": products,
    "sum of columns": lambda x: columns(x).view(4, 2, 2).sum(1).repeat(1, 2),
    "sum of what was pushed": lambda x: pushed(x).view(4, 2, 4).sum(1),
    "sum of a product that was pushed": lambda x: pushed_product(x)[1].view(4, 2, 4).sum(1),
    "a product that was pushed, and its own": lambda x: pushed_product(gathered(x)[0])[0] + x * 2,
    "sum in another order": lambda x: (
        gathered(x).permute(1, 2, 0).reshape(4, 8).view(4, 2, 4).sum(2, True).expand(4, 2, 2).reshape(4, 4)
    ),
    "add to its own": lambda x: x * 2 + gathered(x)[0],
    "add to all": lambda x: (gathered(x) + x * 2)[0],
    "add the other way": lambda x: gathered(x)[0] + gathered(x).flip(0)[0],
    "add columns in another order": lambda x: columns(x) + torch.cat(gathered(x[:, ::2]).unbind()[::-1], dim=1),
    "sum of what was exchanged": lambda x: exchanged(x).sum(0).repeat(2).view(4, 4),
    "add what was exchanged": lambda x: (x * 2) + exchanged(x).view(4, 4),
    "float": lambda x: gathered(x.int()).float().sum(0),
    "bits": lambda x: gathered(x.view(torch.int32)).view(torch.float32).sum(0),
    "einsum": lambda x: gathered(x).permute(1, 2, 0).logsumexp(2),
}
# What may be read: nothing is added, or what has one result in any order.
WORDS = {
    "side by side": columns,
    "added to the stream": lambda x: columns(x) + columns(x) * 2 + x,
    "by rows": lambda x: gathered(x).flatten(0, 1)[:4],
    "to their owners": lambda x: torch.cat(exchanged(x).view(2, 4, 2).unbind(), dim=1),
    "in another order": lambda x: gathered(x).flip(0).flatten(0, 1)[:4],
    "pieces of what was pushed": lambda x: ops.linear_add(*pieces(pushed(x)), x),
    "own columns of a product that was pushed": lambda x: pushed_product(x)[0] + x,
    "pieces of a product that was pushed": lambda x: ops.linear_add(*pieces(pushed_product(x)[1]), x),
    "sums of what each rank has": lambda x: pushed(x).view(4, 2, 2, 2).sum(3).flatten(1),
    "the largest": lambda x: gathered(x).amax(0),
    "whole numbers": lambda x: gathered(x.int()).sum(0).float(),
    "weights": lambda x: COLLECTIVES.wait_tensor(COLLECTIVES.all_gather_into_tensor(x, 2, "@tp")).view(2, 4, 4).sum(0),
    "one rank's": lambda x: gathered(x)[1] * 2 + gathered(x * 3)[1],
}


def log_probabilities(t: Inputs, x: Tensor) -> dict[str, Tensor]:
    rows, targets = t.user["x"][:, 0], torch.zeros(4, dtype=torch.int64)
    by = ops.Filters(rows, targets.int(), rows, rows)
    return {"y": ops.token_logprobs(x + 1, t.param["w"], targets, by).logprob_C}


def keys(t: Inputs, x: Tensor) -> dict[str, Tensor]:
    t.kv["k"].copy_(t.user["x"])
    t.kv["k"][1:].copy_(x[1:] * 2)
    return {}


def scores(t: Inputs, x: Tensor) -> dict[str, Tensor]:
    in_memory = torch.empty_like(x)
    in_memory.copy_(x)
    return {"y": ops.route(in_memory, None, ops.RouteSettings(2, False, 1, 1, True, 1.0))[0]}


FOLLOWS = {
    "log-probabilities follow from it in node token_logprobs": log_probabilities,
    "kv 'k' is written from it in node copy_": keys,
    "a choice of experts follows from it in node route": scores,
    "output 'logprob_C' follows from it": lambda t, x: {"logprob_C": x * 2},
}


@pytest.mark.parametrize("message", FOLLOWS)
def test_a_float_added_across_ranks_decides_nothing(message: str) -> None:
    body = FOLLOWS[message]
    for name in ("all_reduce", "sum"):
        added = ADDED[name]
        with pytest.raises(GraphError, match=rf"node {name}.* adds floats of several ranks, and {message}"):
            verify(captured(lambda t, b=body, f=added: b(t, f(t.user["x"])), writes={"kv"}))
    verify(captured(lambda t: body(t, columns(t.user["x"])), writes={"kv"}))  # what moves may be read
    verify(captured(lambda t: {"y": added(t.user["x"])} | body(t, t.user["x"]), writes={"kv"}))


@pytest.mark.parametrize("added", ADDED)
def test_words_of_ranks_that_are_added_to_one_another_are_found(added: str) -> None:
    with pytest.raises(GraphError, match="adds floats of several ranks, and a choice of experts follows from it"):
        verify(captured(lambda t, f=ADDED[added]: scores(t, f(t.user["x"]))))


@pytest.mark.parametrize("words", WORDS)
def test_words_of_ranks_that_only_move_are_no_sum(words: str) -> None:
    verify(captured(lambda t, f=WORDS[words]: scores(t, f(t.user["x"]))))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda t: {"y": t.user["x"] * t.user["x"].sum().item()}, r"_local_scalar_dense .*brings a value to the host"),
        (lambda t: {"y": t.user["x"].nonzero()}, r"node nonzero .*the size of its result depends on values"),
        (lambda t: {"y": t.user["x"][t.user["mask"]]}, r"node index .*a boolean index is counted on the host"),
        (lambda t: {"y": t.user["x"] + torch.rand(4, 4)}, r"node rand .*global random state"),
        (lambda t: {"y": torch.ones(2, device="meta")}, r"node ones .*lies on meta, the first input on cpu"),
        (lambda t: {"y": on_the_host(t.user["x"])}, r"node on_the_host .*it is tagged cudagraph_unsafe"),
    ],
)
def test_what_a_cuda_graph_cannot_hold_is_refused_only_there(body, message: str) -> None:
    graph = captured(body)
    assert verify(graph) is graph
    with pytest.raises(GraphError, match=message):
        verify(replace(graph, recorded=True))


def test_an_incomplete_signature_is_refused() -> None:
    graph = captured(lambda t: {"y": t.user["x"] * 2})
    with pytest.raises(GraphError, match="the graph has 5 inputs, its signature names 4"):
        verify(replace(graph, inputs=graph.inputs[1:]))
    with pytest.raises(GraphError, match="its signature names 2 outputs"):
        verify(replace(graph, outputs=("y", "z")))
    elsewhere = replace(graph.inputs[0], device=torch.device("meta"))
    with pytest.raises(GraphError, match="on cpu, its signature says otherwise"):
        verify(replace(graph, inputs=(elsewhere, *graph.inputs[1:])))
    other = replace(graph.inputs[0], shape=(5, 4))
    with pytest.raises(GraphError, match=r"param 'w' is torch.float32 \[4, 4\] on cpu, its signature says otherwise"):
        verify(replace(graph, inputs=(other, *graph.inputs[1:])))


def test_matrix_products_belong_in_the_backward_pass() -> None:
    def body(t: Inputs) -> dict[str, Tensor]:
        with backward():
            return {"y": t.user["x"] @ t.param["w"]}

    verify(captured(body))
    with pytest.raises(GraphError, match="must use ops.linear"):
        verify(captured(lambda t: {"y": t.user["x"] @ t.param["w"]}))


def test_every_problem_is_listed_up_to_a_number() -> None:
    def body(t: Inputs) -> dict[str, Tensor]:
        y = t.user["x"]
        for _ in range(11):
            y = y @ t.param["w"]
        return {"y": y}

    with pytest.raises(GraphError, match="node mm_7 .*\n  and 3 more"):
        verify(captured(body))


def test_an_input_that_is_written_shares_memory_with_no_other() -> None:
    def body(t: Inputs) -> dict[str, Tensor]:
        t.grad["g"].add_(t.user["x"])
        return {"y": t.param["w"] * 2}

    memory = torch.zeros(3, 4, 4)

    def bind(g: Tensor, w: Tensor, k: Tensor) -> GraphLauncher:
        found = Inputs(param={"w": w}, grad={"g": g}, kv={"k": k}, user={"x": torch.ones(4, 4)})
        return GraphLauncher(verify(capture("f", body, found, writes={"grad"})), found)

    bind(memory[0], memory[1], memory[1])  # only read
    for g, w, k in ((0, 0, 1), (0, 1, 0)):
        other = "param 'w'" if w == 0 else "kv 'k'"
        with pytest.raises(GraphError, match=f"f.*: grad 'g' is written in place and shares memory with {other}; pass"):
            bind(memory[g], memory[w], memory[k])
    with pytest.raises(GraphError, match="grad 'g' is written in place and shares memory with param 'w'"):
        bind(memory.view(-1)[8:24].view(4, 4), memory[0], memory[2])
