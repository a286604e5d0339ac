"""The backward of the row operators and of the log-probabilities on a GPU: its error beside that of the same formula
in float32 torch, its bits when repeated and captured, and its time (`-s` shows the tables). Shapes are Qwen3-0.6B's
over one packed step.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from values import relative_error

from lockstep import ops
from lockstep.ops.embedding.operator import accumulate_rows
from lockstep.ops.linear.operator import linear_fp32
from lockstep.ops.logprobs import operator as logprobs_operator
from lockstep.ops.logprobs import reference as logprobs_reference
from lockstep.ops.logprobs import triton_backward as logprobs_triton_backward
from lockstep.ops.records import ScoredRows, slice_rows

DEVICE = "cuda"
TOKENS, SCORED, VOCABULARY, DIM, FEED_FORWARD = 4685, 4000, 151_936, 1024, 3072
HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
BYTES_PER_MS = 4.0e9  # an H200's memory, about
FLOPS_PER_MS = 790e9  # its measured bfloat16 matrix products


class Case(NamedTuple):
    """An operator, its definition in plain torch, what it is differentiated for, and its output's gradient."""

    operator: Callable[..., Tensor]
    formula: Callable[..., Tensor]
    leaves: list[Tensor]
    grad: Tensor


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(torch.bfloat16)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


def rotated(qkv: Tensor, cos_sin: Tensor, *weights: Tensor) -> Tensor:
    qk = qkv[:, : (HEADS + KV_HEADS) * HEAD_DIM].unflatten(1, (HEADS + KV_HEADS, HEAD_DIM))
    if weights:
        qk = norm(qk, torch.cat((weights[0].expand(HEADS, -1), weights[1].expand(KV_HEADS, -1))))
    (cos, sin), (first, second) = cos_sin.to(qk.dtype).unsqueeze(1).chunk(2, -1), qk.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, 1)
    return torch.nn.functional.silu(gate) * up


def case(name: str) -> Case:
    torch.manual_seed(0)
    if name == "rms_norm":
        leaves = [3 * normal(TOKENS, DIM), normal(DIM)]
        return Case(lambda x, w: ops.rms_norm(x, w, 1e-6), norm, leaves, normal(TOKENS, DIM))
    if name == "silu_mul":
        return Case(ops.silu_mul, gated, [2 * normal(TOKENS, 2 * FEED_FORWARD)], normal(TOKENS, FEED_FORWARD))
    if name == "gather_rows":  # few rows often, as text has it, and padding that is all one row
        rows = (torch.rand(TOKENS, device=DEVICE) ** 8 * VOCABULARY).long()
        rows[-400:] = 0
        return Case(
            lambda table: ops.gather_rows(table, rows),
            lambda table: table[rows],
            [normal(VOCABULARY, DIM)],
            normal(TOKENS, DIM),
        )
    inverse = 1e6 ** (-torch.arange(0, 1, 2 / HEAD_DIM, device=DEVICE))
    cos_sin = ops.rope_table(torch.arange(TOKENS, device=DEVICE), inverse)
    leaves = [normal(TOKENS, (HEADS + 2 * KV_HEADS) * HEAD_DIM)]
    if name == "qk_norm_rope":
        leaves += [normal(HEAD_DIM), normal(HEAD_DIM)]

    def operator(qkv: Tensor, q_weight: Tensor | None = None, k_weight: Tensor | None = None) -> Tensor:
        return ops.qk_norm_rope(qkv, ops.Rotation(q_weight, k_weight, cos_sin, HEADS, KV_HEADS, 1e-6))

    grad = normal(TOKENS, HEADS + KV_HEADS, HEAD_DIM)
    return Case(operator, lambda qkv, *weights: rotated(qkv, cos_sin, *weights), leaves, grad)


CASES = ("rms_norm", "qk_norm_rope", "rope", "silu_mul", "gather_rows")


def gradients(function: Callable[..., Tensor], leaves: list[Tensor], grad: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """By autograd of `function`, everything in `dtype`."""
    leaves = [x.to(dtype).detach().requires_grad_() for x in leaves]
    return list(torch.autograd.grad(function(*leaves), leaves, grad.to(dtype)))


@pytest.mark.parametrize("name", CASES)
def test_error_is_no_larger_than_float32_torch_s(name):
    operator, formula, leaves, grad = case(name)
    ours = gradients(operator, leaves, grad, torch.bfloat16)
    plain = gradients(formula, leaves, grad, torch.float32)
    exact = gradients(formula, leaves, grad, torch.float64)
    for i, (mine, torch_s, truth) in enumerate(zip(ours, plain, exact, strict=True)):
        assert mine.dtype == torch.bfloat16 and mine.shape == truth.shape
        error, other = relative_error(mine, truth), relative_error(torch_s.to(mine.dtype), truth)
        print(f"\n{name:14s} input {i}: error {error:.2e}, float32 torch rounded once {other:.2e}")
        assert error <= 1.02 * other


class Inputs(NamedTuple):
    """Inputs of `token_logprobs`, gradients of both log-probabilities."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    filters: ops.Filters
    support: Tensor | None
    truncated: bool
    grads: tuple[Tensor, Tensor]


def scored(kind: str, rows: int = 700, vocabulary: int = VOCABULARY) -> Inputs:
    torch.manual_seed(0)
    number = torch.ones(rows, device=DEVICE)
    temperature = number if kind == "plain" else torch.rand(rows, device=DEVICE) + 0.5
    temperature = torch.where(torch.arange(rows, device=DEVICE) % 50 == 3, 0.0, temperature)
    targets = torch.randint(vocabulary, (rows,), device=DEVICE)
    kept = torch.rand(rows, vocabulary, device=DEVICE) < 0.5 if kind == "support" else None
    support = None if kept is None else logprobs_reference.pack_support(kept.scatter_(1, targets.unsqueeze(1), True))
    filters = ops.Filters(temperature, (40 * number).int(), 0.95 * number, 0 * number)
    grads = (torch.randn_like(number), torch.randn_like(number))
    inputs = normal(rows, DIM), (0.06 * normal(vocabulary, DIM)).to(torch.bfloat16)
    return Inputs(*inputs, targets, filters, support, kind == "truncated", grads)


def scored_gradients(s: Inputs) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (s.hidden, s.weight)]
    out = ops.token_logprobs(*leaves, s.targets, s.filters, s.support, s.truncated)
    return list(torch.autograd.grad((out.logprob_C, out.model_logprob_C), leaves, s.grads))


def statistics(s: Inputs) -> tuple[Tensor, ...]:
    """Log-sum-exp, that of the sampled distribution, threshold: what the forward leaves."""
    return logprobs_operator._token_logprobs(s.hidden, s.weight, s.targets, s.filters, s.support, s.truncated)[3:]


def scored_by(s: Inputs, stats: tuple[Tensor, ...]) -> ScoredRows:
    return ScoredRows(s.targets, s.filters.temperature_C, s.support, *stats, s.truncated)


def grad_logits(s: Inputs, rows: slice, stats: tuple[Tensor, ...]) -> Tensor:
    """Of the torch formula, float32."""
    return logprobs_operator.grad_logits(
        linear_fp32(s.hidden[rows], s.weight), slice_rows(scored_by(s, stats), rows), *(x[rows] for x in s.grads)
    )


def torch_path(s: Inputs, stats: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The torch formula, 1,024 rows at a time."""
    grad_hidden = torch.empty_like(s.hidden)
    grad_weight = torch.zeros_like(s.weight, dtype=torch.float32)
    for i in range(0, s.hidden.shape[0], logprobs_operator.CHUNK):
        rows = slice(i, i + logprobs_operator.CHUNK)
        grad = grad_logits(s, rows, stats).to(s.hidden.dtype)
        grad_hidden[rows] = grad @ s.weight
        grad_weight += grad.t() @ s.hidden[rows]
    return grad_hidden, grad_weight.to(s.weight.dtype)


@pytest.mark.parametrize("chunk_bytes", [None, 1])
@pytest.mark.parametrize("kind", ["plain", "truncated", "support"])
def test_error_of_the_logprobs(kind, chunk_bytes, monkeypatch):
    s = scored(kind)
    stats = statistics(s)
    plain = torch_path(s, stats)
    if chunk_bytes is not None:  # the smallest chunks, the last a part of one
        monkeypatch.setattr(logprobs_triton_backward, "CHUNK_BYTES", chunk_bytes)
    ours = scored_gradients(s)
    grad = grad_logits(s, slice(None), stats).double()
    exact = grad @ s.weight.double(), grad.t() @ s.hidden.double()
    for what, mine, torch_s, truth in zip(("hidden", "weight"), ours, plain, exact, strict=True):
        assert mine.dtype == torch.bfloat16 and mine.shape == truth.shape
        error, other = relative_error(mine, truth), relative_error(torch_s, truth)
        print(f"\n{kind:10s} chunks of {chunk_bytes} bytes, {what}: error {error:.2e}, torch path {other:.2e}")
        assert error <= 1.05 * other


@pytest.mark.parametrize(
    ("kind", "rows"), [("plain", 700), ("truncated", 1500), ("support", 700), ("truncated", 14_200)]
)
def test_logits_that_are_kept_give_the_words_of_those_that_are_not(kind, rows, census):
    """Of more logits than a 32-bit number counts, too."""
    s = scored(kind, rows)
    logits = linear_fp32(s.hidden, s.weight)
    apart = logprobs_operator._token_logprobs(s.hidden, s.weight, s.targets, s.filters, s.support, s.truncated)
    found = logprobs_operator.score_logits(logits, s.targets, s.filters, s.support, s.truncated)
    arguments = (*s.grads, s.hidden, s.weight, scored_by(s, apart[3:]))
    apart += logprobs_operator.token_logprobs_backward(*arguments)
    found += logprobs_operator.token_logprobs_backward(*arguments, logits)
    for a, b in zip(apart, found, strict=True):
        assert census(f"logits kept, {kind}, {rows} rows", a, b) == 0


def capture(function: Callable, calls: int = 1) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [function() for _ in range(calls)]
    return graph, results[-1]


@pytest.mark.parametrize("name", [*CASES, "plain", "truncated", "support"])
def test_repeated_and_captured_bits(name, census):
    if name in CASES:
        operator, _, leaves, grad = case(name)

        def function() -> list[Tensor]:
            return gradients(operator, leaves, grad, torch.bfloat16)
    else:
        inputs = scored(name)

        def function() -> list[Tensor]:
            return scored_gradients(inputs)

    first = function()
    for _ in range(3):
        for a, b in zip(first, function(), strict=True):
            assert census(f"backward of {name}: repeated", a, b) == 0
    graph, captured = capture(function)
    for x in captured:
        x.zero_()
    graph.replay()
    for a, b in zip(first, captured, strict=True):
        assert census(f"backward of {name}: captured", a, b) == 0


def captured_milliseconds(function: Callable, calls: int = 5) -> float:
    """One call of several in a CUDA graph, the best of five replays after one that does not count."""
    graph, _ = capture(function, calls)
    times = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times[1:]) / calls


@pytest.mark.timed
@pytest.mark.parametrize("name", CASES)
def test_speed_of_rows(name):
    """Within three times what memory allows, or 25 us."""
    operator, formula, leaves, grad = case(name)
    leaves = [x.detach().requires_grad_() for x in leaves]
    forward = captured_milliseconds(lambda: operator(*leaves))
    ours = captured_milliseconds(lambda: torch.autograd.grad(operator(*leaves), leaves, grad)) - forward
    if name == "gather_rows":
        rows = (torch.rand(TOKENS, device=DEVICE) ** 8 * VOCABULARY).long()
        read = grad.nbytes
        total = torch.empty(VOCABULARY, DIM, device=DEVICE)
        plain = captured_milliseconds(lambda: accumulate_rows(total.zero_(), rows, grad.float()).to(grad.dtype), 2)
    else:
        read = grad.nbytes + sum(x.nbytes for x in leaves)
        both = captured_milliseconds(lambda: gradients(formula, leaves, grad, torch.float32))
        plain = both - captured_milliseconds(lambda: formula(*[x.float() for x in leaves]))
    floor = (read + sum(x.nbytes for x in leaves)) / BYTES_PER_MS
    print(f"\n{name:14s} us: {1e3 * ours:.0f}, floor {1e3 * floor:.0f}, float32 torch {1e3 * plain:.0f}")
    assert ours < max(3 * floor, 0.025)


@pytest.mark.timed
@pytest.mark.parametrize("kind", ["plain", "truncated", "support"])
def test_speed_of_logprobs(kind):
    """Within 2.2 times the three matrix products at the measured peak, both log-probabilities differentiated, or two
    where the logits were kept."""
    s = scored(kind, SCORED)
    stats = statistics(s)
    arguments = (*s.grads, s.hidden, s.weight, scored_by(s, stats))
    plain = captured_milliseconds(lambda: torch_path(s, stats), 1)
    for products, kept in ((3, ()), (2, (linear_fp32(s.hidden, s.weight),))):
        ours = captured_milliseconds(lambda kept=kept: logprobs_operator.token_logprobs_backward(*arguments, *kept), 2)
        floor = products * 2 * SCORED * VOCABULARY * DIM / FLOPS_PER_MS
        print(f"\nlogprobs {kind:10s} ms: {ours:.2f}, {products} products alone {floor:.2f}, torch path {plain:.2f}")
        assert ours < 2.2 * floor
