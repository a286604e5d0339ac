"""Every operator on a GPU beside the fastest of its kind: time, the floor that bytes and FLOPs set, and the error.

Times are of calls inside a CUDA graph, over enough copies of the weights that they come from memory; errors are
||x - exact|| / ||exact|| against float64 on the same inputs. `--only` picks sections, `--models` architectures.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import Report
from ops_attention import attention
from ops_common import BYTES_PER_S, DEVICE, FLOPS_PER_S, ON_GPU, Bench, Record, Run, error, normal
from torch import Tensor

from lockstep import ops
from lockstep.models.config import ModelConfig
from lockstep.models.init import architecture
from lockstep.ops.linear import cublas
from lockstep.ops.logprobs import philox

COLD_BYTES = 200 << 20 if ON_GPU else 1  # more than the L2 cache holds
ROWS = (2, 8, 16, 40, 64, 128, 256, 512, 1024, 2048, 4096, 8192) if ON_GPU else (2, 40)
TOKENS, PACKED_TOKENS = ((4000, 9800), 4685) if ON_GPU else ((40, 98), 47)
SAMPLED_ROWS = (1, 8, 40, 256) if ON_GPU else (1, 3)
EPS = 1e-6


@contextmanager
def stock_cublas() -> Iterator[None]:
    """The library as torch sets it up."""
    if not ON_GPU:
        yield
        return
    torch.backends.cuda.preferred_blas_library("cublas")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    try:
        yield
    finally:
        cublas.configure_cuda.__wrapped__()


def stock_linear(x: Tensor, weight: Tensor) -> Tensor:
    """The library's product as torch sets it up, at the time of the call."""
    with stock_cublas():
        return F.linear(x, weight)


def projections(c: ModelConfig) -> dict[str, tuple[int, int]]:
    """(N, K) of a layer's products."""
    attended = c.num_heads * c.head_dim
    return {
        "qkv": (attended + 2 * c.num_kv_heads * c.head_dim, c.hidden_size),
        "o": (c.hidden_size, attended),
        "gate_up": (2 * c.intermediate_size, c.hidden_size),
        "down": (c.hidden_size, c.intermediate_size),
    }


def linear(bench: Bench, models: dict[str, ModelConfig]) -> None:
    """bfloat16 products of every projection against cuBLAS as torch sets it up, and cuBLASLt without split-K."""
    if ON_GPU:
        compile_linear(models)
    for model, config in models.items():
        for projection, (n, k) in projections(config).items():
            weights = [normal(n, k, scale=k**-0.5) for _ in range(math.ceil(COLD_BYTES / (2 * n * k)))]
            for m in ROWS:
                linear_case(bench, f"{model} {projection} {m}x{n}x{k}", normal(m, k), weights)


def compile_linear(models: dict[str, ModelConfig]) -> None:
    """The kernels that the table names, side by side."""
    from lockstep.ops.precompile import compile_only

    with compile_only():
        for n, k in {shape for config in models.values() for shape in projections(config).values()}:
            weight = normal(n, k)
            for m in ROWS:
                ops.linear(normal(m, k), weight)


def linear_case(bench: Bench, case: str, x: Tensor, weights: list[Tensor]) -> None:
    (m, k), n = x.shape, weights[0].shape[0]

    def each(function: Callable[[Tensor, Tensor], Tensor]) -> list[Callable[[], Tensor]]:
        return [lambda w=w: function(x, w) for w in weights]

    systems = {"ours": each(ops.linear)}
    if ON_GPU:
        systems["cuBLASLt, K whole"] = each(cublas.cublaslt_linear)
    systems["cuBLAS"] = each(stock_linear)
    others = bench.time_all(systems)
    ours = others.pop("ours")
    torch_s = stock_linear(x, weights[0])[:64]
    exact = x[:64].double() @ weights[0].double().t()
    errors = {"error": error(ops.linear(x, weights[0])[:64], exact), "torch_error": error(torch_s, exact)}
    bench.add("linear", case, ours, others, 2 * (m * k + n * k + m * n), 2 * m * n * k, **errors)


def head(model: ModelConfig) -> Tensor:
    """An LM head whose logits have a standard deviation of 1 for normal rows."""
    return normal(model.vocab_size, model.hidden_size, scale=model.hidden_size**-0.5)


def sampling_columns(rows: int, temperature: float, top_p: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    one = torch.ones(rows, device=DEVICE)
    return temperature * one, torch.zeros_like(one).int(), top_p * one, 0 * one


def peak_bytes(run: Run) -> int:
    """What a call allocates at its peak, beyond what is there; 0 on a CPU."""
    run()
    if not ON_GPU:
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def logprobs(bench: Bench, models: dict[str, ModelConfig]) -> None:
    """Forward and backward of the tokens' log-probabilities against `F.cross_entropy` of bfloat16 logits."""
    for name, model in models.items():
        weight = head(model).requires_grad_()
        for tokens in TOKENS:
            hidden, targets = (
                normal(tokens, model.hidden_size),
                torch.randint(model.vocab_size, (tokens,), device=DEVICE),
            )
            hidden.requires_grad_()
            grad = torch.randn(tokens, device=DEVICE)

            def torch_s(h=hidden, w=weight, t=targets, g=grad) -> tuple[Tensor, ...]:
                logits = F.linear(h, w)
                loss = F.cross_entropy(logits.to(torch.promote_types(h.dtype, torch.float32)), t, reduction="none")
                return torch.autograd.grad(-loss, (h, w), g)

            def ours(temperature: float, top_p: float, h=hidden, w=weight, t=targets, g=grad) -> tuple[Tensor, ...]:
                columns = sampling_columns(len(t), temperature, top_p)
                out = ops.token_logprobs(h, w, t, ops.Filters(*columns), None, top_p < 1)
                return torch.autograd.grad(out.logprob_C, (h, w), g)

            other, other_bytes = {"cross_entropy": bench.time([torch_s], 1)}, peak_bytes(torch_s)
            flops = 4 * 2 * tokens * model.vocab_size * model.hidden_size  # the logits are computed twice
            for case, arguments_ in {"plain": (1.0, 1.0), "temperature 0.8, top-p 0.95": (0.8, 0.95)}.items():
                run = partial(ours, *arguments_)
                more: Record = {"peak_bytes": peak_bytes(run), "other_peak_bytes": other_bytes}
                if case == "plain":
                    more |= logprob_errors(hidden[:512], weight, targets[:512], grad[:512], ours, torch_s)
                bench.add("logprobs", f"{name} {tokens} {case}", bench.time([run], 1), other, 0, flops, **more)


def logprob_errors(
    h: Tensor, w: Tensor, t: Tensor, g: Tensor, ours: Callable[..., Any], torch_s: Callable[..., Any]
) -> Record:
    """Of the gradients for hidden rows and weight, the larger one each."""
    h = h.detach().requires_grad_()
    exact = torch_s(h.detach().double().requires_grad_(), w.detach().double().requires_grad_(), t, g.double())
    mine, other = ours(1.0, 1.0, h, w, t, g), torch_s(h, w, t, g)
    return {
        "error": max(error(a, e) for a, e in zip(mine, exact, strict=True)),
        "torch_error": max(error(a, e) for a, e in zip(other, exact, strict=True)),
    }


def torch_sample(logits_CV: Tensor, noise_CV: Tensor, temperature: float, top_p: float) -> tuple[Tensor, ...]:
    """Top-p by a sort, as transformers does, a draw by exponential noise, and both log-probabilities."""
    z = logits_CV / temperature
    if top_p < 1:
        ascending, order = z.sort(dim=1)
        cut = ascending.softmax(1).cumsum(1) <= 1 - top_p
        z = z.masked_fill(torch.zeros_like(cut).scatter_(1, order, cut), -torch.inf)
    logprobs = z.log_softmax(1)
    token = (logprobs.exp() / noise_CV.exponential_()).argmax(1, keepdim=True)
    return token, logprobs.gather(1, token), logits_CV.log_softmax(1).gather(1, token)


def sampling(bench: Bench, models: dict[str, ModelConfig]) -> None:
    """Drawing a token and its two log-probabilities, the LM head left out; the floor reads the logits once."""
    from lockstep.ops.logprobs import triton as kernels

    def drawn(logits: Tensor, temperature: float, top_p: float) -> Run:
        filters, rows = ops.Filters(*sampling_columns(len(logits), temperature, top_p)), len(logits)
        key = torch.tensor([philox.sample_key(0, 0, 0, 0, i) for i in range(rows)]).to(DEVICE)
        keys = ops.SampleKeys(key, torch.arange(rows, device=DEVICE))

        def run() -> tuple[Tensor, ...]:
            stats = kernels.statistics(logits, filters, None, top_p < 1, False)
            token = kernels.draw(logits, filters.temperature_C, stats.threshold_C, keys, False)
            return token, *kernels.scores(logits, token, filters.temperature_C, stats)

        return run

    for vocabulary in {model.vocab_size for model in models.values()}:
        for rows in SAMPLED_ROWS:
            logits = torch.randn(rows, vocabulary, device=DEVICE)
            noise = torch.empty_like(logits)
            for temperature, top_p in ((1.0, 1.0), (0.8, 1.0), (0.8, 0.95)):
                run = drawn(logits, temperature, top_p)
                other = bench.time([lambda x=logits, n=noise, t=temperature, p=top_p: torch_sample(x, n, t, p)])
                token, _, model_logprob = run()
                exact = logits.double().log_softmax(1).gather(1, token.unsqueeze(1)).squeeze(1)
                torch_s = logits.log_softmax(1).gather(1, token.unsqueeze(1)).squeeze(1)
                case = f"{rows}x{vocabulary} temperature {temperature}, top-p {top_p}"
                errors = {"error": error(model_logprob, exact), "torch_error": error(torch_s, exact)}
                bench.add("sampling", case, bench.time([run]), {"torch": other}, logits.nbytes, **errors)


def row_case(
    bench: Bench, name: str, operator: Callable[..., Tensor], formula: Callable[..., Tensor], leaves: list[Tensor]
) -> None:
    """Forward, and backward as forward and backward less forward, of one row operator."""
    with torch.no_grad():  # nothing of autograd's may outlive a capture
        out, torch_s = operator(*leaves), formula(*leaves)
    leaves = [x.detach().requires_grad_() for x in leaves]
    grad = torch.randn_like(out)

    def both(function: Callable[..., Tensor]) -> Run:
        return lambda: torch.autograd.grad(function(*leaves), leaves, grad)

    doubles = [x.detach().double().requires_grad_() for x in leaves]
    exact = formula(*doubles)
    exact_grads = torch.autograd.grad(exact, doubles, grad.double())
    errors = {"error": error(out, exact), "torch_error": error(torch_s, exact)}
    forward = bench.time([lambda: operator(*leaves)], 20)
    torch_forward = bench.time([lambda: formula(*leaves)], 20)
    read, written = sum(x.nbytes for x in leaves), out.nbytes
    bench.add(name, "forward", forward, {"torch": torch_forward}, read + written, **errors)
    ours, others = bench.time([both(operator)], 20), bench.time([both(formula)], 20)
    errors = {
        key: max(error(a, e) for a, e in zip(run(), exact_grads, strict=True))
        for key, run in {"error": both(operator), "torch_error": both(formula)}.items()
    }
    bench.add(
        name, "backward", _less(ours, forward), {"torch": _less(others, torch_forward)}, 2 * read + written, **errors
    )


def _less(both: dict[str, float], forward: dict[str, float]) -> dict[str, float]:
    return {key: value - forward["median_s"] for key, value in both.items()}


def rows(bench: Bench, models: dict[str, ModelConfig]) -> None:
    """RMSNorm, q/k-norm with RoPE and the gated product at the 4,685 tokens of one packed step; torch's own run in
    bfloat16, which rounds in between."""
    tokens = PACKED_TOKENS
    for name, c in models.items():
        heads, kv, dim = c.num_heads, c.num_kv_heads, c.head_dim
        table = ops.rope_table(
            torch.arange(tokens, device=DEVICE), 1e6 ** (-torch.arange(0, 1, 2 / dim, device=DEVICE))
        )

        def norm(x: Tensor, weight: Tensor) -> Tensor:
            return F.rms_norm(x, x.shape[-1:], weight, EPS)

        def rotated(qkv: Tensor, q: Tensor, k: Tensor, n=heads, m=kv, h=dim, t=table) -> Tensor:
            qk = qkv[:, : (n + m) * h].unflatten(1, (n + m, h))
            qk = torch.cat((norm(qk[:, :n], q), norm(qk[:, n:], k)), 1)
            (cos, sin), (first, second) = t.to(qk.dtype).unsqueeze(1).chunk(2, -1), qk.chunk(2, -1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

        def gated(x: Tensor) -> Tensor:
            gate, up = x.chunk(2, 1)
            return F.silu(gate) * up

        def ours_rotated(x: Tensor, q: Tensor, k: Tensor, n=heads, m=kv, t=table) -> Tensor:
            return ops.qk_norm_rope(x, ops.Rotation(q, k, t, n, m, EPS))

        leaves = [normal(tokens, c.hidden_size), normal(c.hidden_size)]
        row_case(bench, f"{name} rms_norm", lambda x, w: ops.rms_norm(x, w, EPS), norm, leaves)
        leaves = [normal(tokens, (heads + 2 * kv) * dim), normal(dim), normal(dim)]
        row_case(bench, f"{name} qk_norm_rope", ours_rotated, rotated, leaves)
        row_case(bench, f"{name} silu_mul", ops.silu_mul, gated, [normal(tokens, 2 * c.intermediate_size)])


def embedding_gradient(
    lookup: Callable[[Tensor, Tensor], Tensor], table: Tensor, index: Tensor, grad: Tensor
) -> Tensor:
    """Forward and backward; the table's gradient."""
    return torch.autograd.grad(lookup(table, index), table, grad)[0]


def embedding(bench: Bench, models: dict[str, ModelConfig]) -> None:
    """Backward of the lookup, rows as frequent as words are; torch's own adds with atomics."""
    for name, c in models.items():
        for tokens in (PACKED_TOKENS, TOKENS[-1]):
            index = (torch.rand(tokens, device=DEVICE) ** 8 * c.vocab_size).long()
            table = normal(c.vocab_size, c.hidden_size).requires_grad_()
            grad = normal(tokens, c.hidden_size)
            exact = torch.zeros(table.shape, dtype=torch.float64, device=DEVICE).index_add_(0, index, grad.double())
            ours = partial(embedding_gradient, ops.gather_rows, table, index, grad)
            other = partial(embedding_gradient, lambda t, i: F.embedding(i, t), table, index, grad)
            errors = {"error": error(ours(), exact), "torch_error": error(other(), exact)}
            moved = table.nbytes + 2 * grad.nbytes
            bench.add("embedding", f"{name} {tokens} forward and backward", bench.time([ours]),
                      {"torch": bench.time([other])}, moved, **errors)  # fmt: skip


SECTIONS: dict[str, Callable[[Bench, dict[str, ModelConfig]], None]] = {
    "linear": linear,
    "logprobs": logprobs,
    "sampling": sampling,
    "rows": rows,
    "embedding": embedding,
    "attention": attention,
}


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=list(SECTIONS), nargs="*", default=list(SECTIONS))
    default = "qwen3-0.6b" if ON_GPU else "tiny"
    parser.add_argument("--models", nargs="*", default=[default], help=f"architectures (default: {default})")


def measure(args: argparse.Namespace, report: Report) -> None:
    if ON_GPU:
        cublas.configure_cuda()
    torch.manual_seed(0)
    bench = Bench(args.repeats)
    models = {name: architecture(name) for name in args.models}
    report.figures |= {"models": args.models, "bytes_per_s": BYTES_PER_S, "flops_per_s": FLOPS_PER_S}
    report.figures["records"] = bench.records
    for name in args.only:
        SECTIONS[name](bench, models)
        report.save()
        if ON_GPU:
            torch.cuda.empty_cache()
    report.tables.append(bench.table())
    for r in bench.records:
        if "peak_bytes" in r:
            ours, other = (r[k] / 2**30 for k in ("peak_bytes", "other_peak_bytes"))
            report.notes.append(f"{r['op']} {r['case']}: {ours:.2f} GiB at the peak, cross_entropy {other:.2f}")
