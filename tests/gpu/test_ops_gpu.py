"""The operators' bits on a GPU: every test compares words, and each kind has a control that must differ.

Shapes are Qwen3-0.6B's. Inputs have wide exponents, N(0, 1) * exp(2 N(0, 1)), so that a change in the order of
additions shows.
"""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from attention_cases import cache_of, qkv_rows
from torch import Tensor
from values import int32, relative_error, wide

from lockstep import ops
from lockstep.ops.linear import cublas
from lockstep.ops.linear.operator import linear_fp32
from lockstep.ops.logprobs import philox
from lockstep.ops.logprobs import reference as logprobs_reference

DEVICE = "cuda"
ROWS = (1, 2, 7, 8, 40, 64, 100, 256, 512, 4725)
PROJECTIONS = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))  # (N, K)
VOCABULARY, DIM = 151_936, 1024
HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
BATCHES = (1, 2, 3, 7, 8, 16, 17, 63, 64, 65, 127, 1025)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).bfloat16()


# Matrix products


@pytest.mark.parametrize(("n", "k"), PROJECTIONS)
def test_linear_is_one_ascending_chain(census, n, k):
    from lockstep.ops.linear.triton import chain as chain_of

    x, weight = wide(max(ROWS), k), wide(n, k)
    chain = chain_of(x, weight)
    assert relative_error(chain, x.double() @ weight.double().t()) < 4e-3
    for m in ROWS:
        assert census("linear: cuBLASLt = one chain", ops.linear(x[:m], weight), chain[:m]) == 0
        assert census("linear: cuBLASLt = one chain, last rows", ops.linear(x[-m:], weight), chain[-m:]) == 0


def test_linear_fp32_is_invariant_to_rows(census):
    x, weight = wide(600, DIM), wide(VOCABULARY, DIM)
    whole = linear_fp32(x, weight)
    assert relative_error(whole[:8], x[:8].double() @ weight.double().t()) < 1e-5
    for m in (1, 2, 8, 24, 40, 64, 100, 256):
        assert (
            census("linear_fp32: m rows = 600 rows", linear_fp32(x[300 : 300 + m], weight), whole[300 : 300 + m]) == 0
        )
    rounded = ops.linear(x, weight)
    assert census("linear_fp32 rounded = linear", whole.bfloat16(), rounded) == 0


def test_split_k_is_caught(census):
    x, weight = wide(64, 3072), wide(1024, 3072)
    halves = [linear_fp32(x[:, half], weight[:, half]) for half in (slice(0, 1536), slice(1536, 3072))]
    assert census("CONTROL linear: K in two halves", (halves[0] + halves[1]), linear_fp32(x, weight)) > 0


def test_stock_cublas_is_caught(census):
    """cuBLAS as torch calls it by default splits K at K = 3072 for few rows."""
    x, weight = wide(40, 3072), wide(1024, 3072)
    contract = ops.linear(x, weight)
    try:
        torch.backends.cuda.preferred_blas_library("cublas")
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
        stock = F.linear(x, weight)
    finally:
        cublas.configure_cuda.__wrapped__()
    assert census("CONTROL linear: stock cuBLAS", stock, contract) > 0


# Row operators


@pytest.mark.parametrize("width", [1024, 2560])
def test_rms_norm_is_invariant_to_batch_and_place(census, width):
    x, weight = wide(max(BATCHES), width), normal(width)
    whole = ops.rms_norm(x, weight, 1e-6)
    exact = x.double() * torch.rsqrt(x.double().square().mean(1, keepdim=True) + 1e-6) * weight.double()
    assert relative_error(whole, exact) < 4e-3
    strided = torch.cat((x, torch.full_like(x, torch.nan)), dim=1)[:, :width]
    shifted = torch.cat((torch.full_like(x[:, :1], torch.nan), x), dim=1)[:, 1:]  # rows off their 16-byte alignment
    for view in (strided, shifted):
        assert census("rms_norm: view = contiguous", ops.rms_norm(view, weight, 1e-6), whole) == 0
    for n in BATCHES:
        assert census("rms_norm: n rows = all rows", ops.rms_norm(x[-n:], weight, 1e-6), whole[-n:]) == 0


@pytest.mark.parametrize("norm", [True, False])
def test_qk_norm_rope_is_invariant_to_batch_and_place(census, norm):
    qkv = wide(max(BATCHES), (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    weights = (normal(HEAD_DIM), normal(HEAD_DIM)) if norm else (None, None)
    inv_freq = 1e6 ** (-torch.arange(0, HEAD_DIM, 2, device=DEVICE) / HEAD_DIM)
    table = ops.rope_table(torch.randint(0, 4096, (len(qkv),), device=DEVICE), inv_freq)
    arguments = (*weights, table, HEADS, KV_HEADS, 1e-6)
    whole = ops.qk_norm_rope(qkv, ops.Rotation(*arguments))
    cpu = [a.cpu() if isinstance(a, Tensor) else a for a in arguments]
    assert relative_error(whole.cpu(), ops.qk_norm_rope(qkv.cpu(), ops.Rotation(*cpu)).double()) < 4e-3
    for n in BATCHES:
        some = ops.qk_norm_rope(qkv[-n:], ops.Rotation(*weights, table[-n:], HEADS, KV_HEADS, 1e-6))
        assert census("qk_norm_rope: n rows = all rows", some, whole[-n:]) == 0


def test_rope_table_has_the_words_of_torch(census):
    inv_freq = 1e6 ** (-torch.arange(0, HEAD_DIM, 2, device=DEVICE) / HEAD_DIM)
    positions = torch.arange(1 << 17, device=DEVICE).flip(0)
    table = ops.rope_table(positions, inv_freq)
    assert census("rope_table = torch", table, ops.rope_table.__wrapped__(positions, inv_freq)) == 0
    assert census("rope_table: n rows = all rows", ops.rope_table(positions[5:12], inv_freq), table[5:12]) == 0


def test_silu_mul_is_invariant_to_batch_and_place(census):
    gate_up = wide(max(BATCHES), 2 * 3072)
    whole = ops.silu_mul(gate_up)
    gate, up = gate_up.double().chunk(2, dim=1)
    assert relative_error(whole, F.silu(gate) * up) < 4e-3
    for n in BATCHES:
        assert census("silu_mul: n rows = all rows", ops.silu_mul(gate_up[-n:]), whole[-n:]) == 0


# Log-probabilities and sampling. The filters, one a row in turn: temperature, top-k, top-p, min-p

FILTERS = (
    (1.0, 0, 1.0, 0.0),
    (0.8, 0, 0.95, 0.0),
    (0.8, 50, 1.0, 0.0),
    (1.3, 1000, 0.9, 0.0),
    (0.7, 0, 1.0, 0.05),
    (0.0, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
)


def filter_columns(rows: int) -> ops.Filters:
    columns = torch.tensor(FILTERS, device=DEVICE)[torch.arange(rows, device=DEVICE) % len(FILTERS)]
    temperature, top_k, top_p, min_p = (c.contiguous() for c in columns.unbind(1))
    return ops.Filters(temperature, top_k.int(), top_p, min_p)


def identities(rows: int) -> ops.SampleKeys:
    keys = [philox.sample_key(7, 0, 3, i // 8, i % 8) for i in range(rows)]
    return ops.SampleKeys(torch.tensor(keys, device=DEVICE), torch.arange(100, 100 + rows, device=DEVICE))


@pytest.fixture(scope="module")
def head() -> tuple[Tensor, Tensor]:
    """Hidden rows and an LM head whose logits have a standard deviation of about 3."""
    torch.manual_seed(1)
    return normal(1100, DIM), normal(VOCABULARY, DIM) * (3 / DIM**0.5)


def test_sampled_logprobs_are_the_scored_ones(census, head):
    hidden, weight = head
    columns, keys = filter_columns(40), identities(40)
    token, logprob, model_logprob = ops.sample(hidden[:40], weight, keys, columns, True, True)
    place = torch.arange(40, device=DEVICE) * 27 + 13  # among others, on both sides of a chunk's edge
    others, filters = hidden.roll(500, 0).contiguous(), filter_columns(len(hidden))
    others[place] = hidden[:40]
    targets = torch.randint(0, VOCABULARY, (len(hidden),), device=DEVICE)
    targets[place] = token
    for column, own in zip(filters, columns, strict=True):
        column[place] = own
    scored = ops.token_logprobs(others, weight, targets, filters, None, True)
    assert census("sampled log-prob = scored", scored.logprob_C[place], logprob) == 0
    assert census("model log-prob: sampled = scored", scored.model_logprob_C[place], model_logprob) == 0
    assert logprob.isfinite().all() and (logprob < 1e-6).all() and (logprob[columns[0] == 0] == 0).all()

    for i in range(0, 40, 9):
        row = slice(i, i + 1)
        own = ops.SampleKeys(*(x[row] for x in keys)), ops.Filters(*(c[row] for c in columns))
        alone = ops.sample(hidden[row], weight, *own, True, True)
        assert census("sample: token of a row alone = in a batch", alone[0], token[row]) == 0
        assert census("sample: log-prob of a row alone = in a batch", alone[1], logprob[row]) == 0


def test_filters_elsewhere_do_not_touch_an_unfiltered_row(census, head):
    hidden, weight = head[0][:64], head[1]
    filters = filter_columns(64)
    targets = torch.arange(64, device=DEVICE)
    truncated = ops.token_logprobs(hidden, weight, targets, filters, None, True)
    plain = ops.token_logprobs(hidden, weight, targets, filters, None, False)
    rows = torch.arange(0, 64, len(FILTERS), device=DEVICE)
    assert (
        census("unfiltered row: truncated batch = plain batch", truncated.logprob_C[rows], plain.logprob_C[rows]) == 0
    )
    assert census("temperature 1: sampled = model log-prob", plain.logprob_C[rows], plain.model_logprob_C[rows]) == 0
    assert census("CONTROL: filtered rows", truncated.logprob_C, plain.logprob_C) > 0


def test_statistics_against_float64(head):
    from lockstep.ops.logprobs import triton as logprobs_triton

    logits = linear_fp32(head[0][:28], head[1])
    columns = filter_columns(28)
    lse, kept_lse, threshold, entropy = logprobs_triton.statistics(logits, columns, None, True, True)
    exact = logits.double()
    z = logits / logprobs_reference.divisor(columns[0]).unsqueeze(1)
    kept = z >= threshold.unsqueeze(1)
    assert relative_error(lse, exact.logsumexp(1)) < 1e-6
    assert relative_error(entropy, -(exact.log_softmax(1).exp() * exact.log_softmax(1)).sum(1)) < 1e-5
    assert relative_error(kept_lse, z.double().masked_fill(~kept, -torch.inf).logsumexp(1)) < 1e-6
    for row, (_, top_k, top_p, min_p) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        at_least, above = int(kept[row].sum()), int((z[row] > threshold[row]).sum())
        p = z[row].double().softmax(0)
        if top_p < 1:  # of what top-k kept
            p = torch.where(z[row] >= z[row].topk(top_k or VOCABULARY).values[-1], p, 0.0)
            p = p / p.sum()
            assert p[z[row] > threshold[row]].sum() < top_p + 1e-5 and p[kept[row]].sum() > top_p - 1e-5
        elif top_k:
            assert above < top_k <= at_least
        elif min_p:
            assert torch.equal(kept[row], p >= min_p * p.max()) or abs(int((p >= min_p * p.max()).sum()) - at_least) < 2
        else:
            assert at_least == VOCABULARY


def test_draw_is_the_reference_draw(head):
    from lockstep.ops.logprobs import triton as logprobs_triton

    logits = linear_fp32(head[0][:21], head[1])
    columns, keys = filter_columns(21), identities(21)
    threshold = logprobs_triton.statistics(logits, columns, None, True, False).threshold_C
    token = logprobs_triton.draw(logits, columns.temperature_C, threshold, keys, True).cpu()
    cpu = [x.cpu() for x in (logits, columns.temperature_C, threshold)]
    expected = logprobs_reference.draw(*cpu, ops.SampleKeys(*(x.cpu() for x in keys)), True)
    assert int((token != expected).sum()) <= 1  # noise differs in its last bits, so a near tie may fall otherwise
    assert int(token[5]) == int(logits[5].argmax()), "temperature 0"


# Terms of whole sequences


LENGTHS = (1, 700, 3, 2500, 0, 17, 1024, 1025)


def sequences(values: Tensor, front: int) -> tuple[Tensor, Tensor]:
    """The values of sequences of `LENGTHS` behind one of `front` tokens, before padding; where each begins and ends."""
    ends = torch.tensor([0, front, *LENGTHS]).cumsum(0)
    padding = torch.full((5,), torch.nan, device=DEVICE)
    return torch.cat((values.new_ones(front), values, padding)), torch.cat((ends, ends[-1:])).int().to(DEVICE)


def test_sums_of_sequences(census):
    """Of integers every order of additions has the reference's bits; of others where a sequence stands has no say."""
    count = sum(LENGTHS)
    integers = torch.randint(-50, 50, (count,), device=DEVICE).float()
    for front in (0, 3):
        values, cu = sequences(integers, front)
        expected = ops.sequence_sum(values.cpu(), cu.cpu())
        assert census("sequence sums: GPU = reference", ops.sequence_sum(values, cu).cpu(), expected) == 0
    values, cu = sequences(torch.randn(count, device=DEVICE), 0)
    alone = ops.sequence_sum(values, cu)
    torch.testing.assert_close(alone.cpu(), ops.sequence_sum(values.cpu(), cu.cpu()), rtol=1e-5, atol=1e-4)
    assert not alone[count:].any()
    for front in (1, 3, 64, 1001):
        behind = ops.sequence_sum(*sequences(values[:count], front))[front : front + count]
        assert census("sequence sums: anywhere = alone", behind, alone[:count]) == 0
    turned = values.clone()
    for start, end in pairwise(cu.tolist()):
        turned[start:end] = values[start:end].flip(0)  # the same numbers, added in another order
    assert census("CONTROL, sequence sums: turned round", ops.sequence_sum(turned, cu), alone) > 0


def test_the_gradient_of_sums_of_sequences(census):
    values, cu = sequences(torch.randn(sum(LENGTHS), device=DEVICE), 3)
    values = values.nan_to_num(0.0).requires_grad_()
    grad = torch.randint(-50, 50, values.shape, device=DEVICE).float()
    (found,) = torch.autograd.grad(ops.sequence_sum(values, cu), values, grad)
    assert census("sequence sums, gradient: GPU = reference", found.cpu(), ops.sequence_sum(grad.cpu(), cu.cpu())) == 0


# Capture


def test_captured_is_eager(census, head):
    """Every kernel in one CUDA graph; the replay reads new inputs and gives the eager bits."""
    hidden, weight = head[0][:40].clone(), head[1]
    norm, gate_up = normal(DIM), normal(2 * 512, DIM)
    columns, keys = filter_columns(40), identities(40)
    q, k, v = qkv_rows(64)
    table, lengths = torch.arange(4, device=DEVICE).int().view(1, 4), (int32(0, 40), int32(64), 40, 64)
    caches = [cache_of(x, table[0], 16) for x in (k, v)]

    def step() -> tuple[Tensor, ...]:
        x = ops.silu_mul(ops.linear(ops.rms_norm(hidden, norm, 1e-6), gate_up))
        attended = ops.attention_paged(q[:40], ops.KVPages(*caches), ops.Paged(table, *lengths))
        return x, attended, *ops.sample(hidden, weight, keys, columns, True, True)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    hidden.copy_(head[0][40:80])
    keys.position_C.add_(1)
    graph.replay()
    for what, a, b in zip(
        ("silu_mul", "attention", "token", "log-prob", "model log-prob"), captured, step(), strict=True
    ):
        assert census(f"replayed = eager: {what}", a, b) == 0
