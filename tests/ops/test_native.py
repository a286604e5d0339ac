"""The C operators: close to the reference path, and a row has the same bits in any batch."""

from __future__ import annotations

import ctypes
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from c_library import using
from native_cases import same, sampling, wide
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from lockstep import ops
from lockstep.ops import native
from lockstep.ops.activation.operator import silu_mul_backward
from lockstep.ops.logprobs import reference as logprobs_reference
from lockstep.ops.logprobs.philox import gumbel, philox
from lockstep.ops.native import library
from lockstep.ops.records import ACTIVATIONS, Filters, Rotation, SampleKeys

pytestmark = pytest.mark.skipif(library.built is None, reason="the C library is not built")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def _both_products() -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    a, b = torch.randn(256, 512), torch.randn(512, 512)
    return lambda: native.linear(a, b), lambda: a @ b.T


def _both_activations() -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    gate_up = torch.randn(256, 2048)
    gate, up = gate_up.chunk(2, dim=1)
    return lambda: native.silu_mul(gate_up), lambda: F.silu(gate) * up


def _both_attentions() -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    q, k, v = torch.randn(3, 256, 4, 64)
    start = torch.tensor([0, 256], dtype=torch.int32)
    layout = ops.Packed(start, *torch.zeros(2, 1, dtype=torch.int32), 256)
    heads_first = [x.transpose(0, 1) for x in (q, k, v)]
    return lambda: native.packed(q, k, v, layout), lambda: F.scaled_dot_product_attention(*heads_first, is_causal=True)


@pytest.mark.parametrize("both", [_both_products, _both_activations, _both_attentions])
def test_vectors_stay_in_registers(both: Callable[[], tuple[Callable[[], Tensor], Callable[[], Tensor]]]) -> None:
    """A compiler that keeps them in memory takes many times as long as torch's own operators, and nothing else tells
    of it."""

    def seconds(operator: Callable[[], Tensor]) -> float:
        began = time.perf_counter()
        operator()
        return time.perf_counter() - began

    ours, torchs = both()
    pairs = [(seconds(ours), seconds(torchs)) for _ in range(30)]
    ours_s, torchs_s = (min(times) for times in zip(*pairs, strict=True))
    print(f"{ours_s * 1e3:.3f} ms, torch's {torchs_s * 1e3:.3f}")
    assert ours_s < 4 * torchs_s


# ---- close to the reference ----


@pytest.mark.parametrize("dim", [1, 16, 24, 100, 128, 333])
def test_row_operators_agree_with_the_reference(dim: int) -> None:
    x, weight = wide(37, dim), torch.randn(dim)
    torch.testing.assert_close(native.rms_norm(x, weight, 1e-6), ops.rms_norm.__wrapped__(x, weight, 1e-6))
    assert same(native.rms_norm(x, weight, 1e-6, 1.0), native.rms_norm(x, weight + 1, 1e-6))


@pytest.mark.parametrize("dim", [1, 24, 333])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_products_agree_with_the_reference(activation: str, dim: int) -> None:
    gate_up, grad = 20 * torch.randn(37, 2 * dim), torch.randn(37, dim)
    both = ((native.silu_mul, ops.silu_mul.__wrapped__, (gate_up, activation)),)
    both += ((native.silu_mul_backward, silu_mul_backward.__wrapped__, (grad, gate_up, activation)),)
    for in_c, reference, arguments in both:
        torch.testing.assert_close(in_c(*arguments), reference(*arguments), rtol=2e-5, atol=1e-6)
    gate, up = gate_up.double().chunk(2, dim=1)
    limited = gate.clamp(max=7.0)
    exact = {
        "silu": F.silu(gate) * up,
        "gelu_tanh": F.gelu(gate, approximate="tanh") * up,
        "swiglu_clamped": (up.clamp(-7.0, 7.0) + 1) * (limited * torch.sigmoid(limited * 1.702)),
    }[activation]
    torch.testing.assert_close(native.silu_mul(gate_up, activation).double(), exact, rtol=1e-5, atol=1e-7)


def test_an_unknown_activation_is_refused() -> None:
    for silu_mul in (native.silu_mul, ops.silu_mul.__wrapped__):
        with pytest.raises(ValueError, match=r"one of silu, gelu_tanh, swiglu_clamped|not in tuple"):
            silu_mul(torch.ones(1, 2), "tanh")


@pytest.mark.parametrize("head_dim", [2, 16, 24, 32, 80, 128])
@pytest.mark.parametrize("norm", [True, False])
def test_qk_norm_rope_agrees_with_the_reference(head_dim: int, norm: bool) -> None:
    qkv, inv_freq = wide(9, 7 * head_dim), 10000 ** (-torch.arange(0, head_dim, 2) / head_dim)
    positions = torch.tensor([0, 1, 2, 63, 64, 500, 4095, 40000, 7])
    table = native.rope_table(positions, inv_freq)
    torch.testing.assert_close(table, ops.rope_table.__wrapped__(positions, inv_freq), rtol=0, atol=2e-7)
    weights = (torch.randn(head_dim), torch.randn(head_dim)) if norm else (None, None)
    arguments = qkv, Rotation(*weights, table, 3, 2, 1e-6)
    torch.testing.assert_close(native.qk_norm_rope(*arguments), ops.qk_norm_rope.__wrapped__(*arguments))
    torch.testing.assert_close(native.qk_norm_rope(*arguments, 1.0), ops.qk_norm_rope.__wrapped__(*arguments, 1.0))


def test_rms_norm_multiplies_by_its_weight_last() -> None:
    x, weight = wide(37, 100), torch.randn(100)
    assert same(native.rms_norm(x, weight, 1e-6), native.rms_norm(x, torch.ones(100), 1e-6) * weight)


def test_exp_is_exact_to_two_ulp_and_safe_at_its_ends() -> None:
    gate = torch.cat((torch.linspace(-87, 88, 100001), torch.tensor([-torch.inf, -200.0, -0.0, 0.0, 200.0, torch.nan])))
    out = native.silu_mul(torch.stack((gate, torch.ones_like(gate)), dim=1)).flatten()
    exact = (gate.double() / (1 + torch.exp(-gate.double()))).float()
    torch.testing.assert_close(out[:100001], exact[:100001], rtol=4 * 2.0**-24, atol=1e-36)
    assert out[-6:-1].isnan().tolist() == [True, False, False, False, False]
    assert out[-5:-1].tolist() == [0.0, 0.0, 0.0, 200.0] and math.isnan(out[-1])


@pytest.mark.parametrize(
    ("rows", "columns", "dim"), [(1, 1, 1), (5, 100, 72), (33, 64, 300), (700, 130, 17), (5, 100, 0)]
)
def test_products_agree_with_torch(rows: int, columns: int, dim: int) -> None:
    x, weight = torch.randn(rows, dim), torch.randn(columns, dim)
    exact = (x.double() @ weight.double().t()).float()
    torch.testing.assert_close(native.linear(x, weight), exact, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(native.matmul(x, weight.t()), exact, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(native.matmul(x.t().contiguous().t(), weight.t()), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("vocabulary", [1, 15, 64, 97, 512, 1000])
@pytest.mark.parametrize("support", ["all", "filtered", "given"])
def test_statistics_agree_with_the_reference(vocabulary: int, support: str) -> None:
    logits, parameters = 5 * torch.randn(12, vocabulary), sampling(12)
    mask = logprobs_reference.pack_support(logits >= logits.median(dim=1, keepdim=True).values)
    arguments = (logits, parameters, mask if support == "given" else None, support != "all", True)
    ours = native.statistics(*arguments)
    for got, expected in zip(ours[:3], logprobs_reference.statistics(*arguments)[:3], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)
    scored = (logits, torch.arange(12) % vocabulary, parameters.temperature_C, ours)
    assert all(map(same, native.scores(*scored), logprobs_reference.scores(*scored)))
    exact = torch.distributions.Categorical(logits=logits.double()).entropy().float()
    torch.testing.assert_close(ours.entropy_C, exact, rtol=1e-5, atol=1e-6)


def test_a_logit_without_probability_adds_no_entropy() -> None:
    logits, parameters = 5 * torch.randn(12, 97), sampling(12)
    logits[:, ::3] = -torch.inf
    exact = torch.distributions.Categorical(logits=logits.double()).entropy().float()
    for rows in (native, logprobs_reference):
        found = rows.statistics(logits, parameters, None, True, True)
        torch.testing.assert_close(found.entropy_C, exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("vocabulary", [1, 5, 64, 65, 1000])
def test_noise_is_philox_word_for_word(vocabulary: int) -> None:
    """With equal logits the smallest word wins, the first one among those that round to the same float32."""
    rows, keys = 300, torch.randint(0, 2**32, (300, 4))
    position = torch.randint(0, 2**31, (rows,))
    k0, k1, c2, c3 = keys.unsqueeze(2).unbind(1)
    words = torch.stack(philox(position.unsqueeze(1), torch.arange(-(-vocabulary // 4)), c2, c3, k0, k1), dim=2)
    expected = words.flatten(1)[:, :vocabulary].float().argmin(dim=1)
    off = torch.full((rows,), -torch.inf)
    assert torch.equal(
        native.draw(torch.zeros(rows, vocabulary), torch.ones(rows), off, SampleKeys(keys, position), False), expected
    )


def test_drawn_tokens_are_the_references() -> None:
    logits, filters = 3 * torch.randn(400, 97), sampling(400)
    filters.temperature_C[::5] = 0
    keys = SampleKeys(torch.randint(0, 2**32, (400, 4)), torch.arange(400))
    threshold = native.statistics(logits, filters, None, True, False).threshold_C
    arguments = (logits, filters.temperature_C, threshold, keys, True)
    ours = native.draw(*arguments)
    assert torch.equal(ours, logprobs_reference.draw(*arguments))
    assert torch.equal(ours[::5], logits[::5].argmax(dim=1))
    tied = torch.zeros(3, 200).index_fill(1, torch.tensor([70, 86, 131]), 1.0)  # in one lane, and in another
    few = SampleKeys(*(x[:3] for x in keys))
    assert native.draw(tied, torch.zeros(3), torch.zeros(3), few, True).tolist() == [70] * 3


def test_noise_at_both_ends_of_the_words() -> None:
    """Two places found by search: the word 6, whose noise is among the largest, and one that rounds to 2 ** 32."""
    key, low, high = torch.tensor([[1, 2, 3, 4]]), (249, 780_955), (74, 417_027)
    noise = gumbel(key, torch.tensor(low[:1]), low[1] + 1)[0, low[1]]
    assert noise.item() == pytest.approx(-math.log(-math.log1p(-6.5 / 2**32)), rel=1e-6)
    logits, one = torch.zeros(1, high[1] + 1), torch.ones(1)
    logits[0, high[1]] = 30.0  # more than any noise
    keys = SampleKeys(key, torch.tensor(high[:1]))
    assert native.draw(logits, one, -torch.inf * one, keys, False).tolist() == [high[1]]


# ---- invariance ----

BATCHES = [1, 2, 3, 7, 8, 16, 17, 63, 64, 65, 130]


@pytest.mark.parametrize("dim", [24, 128, 300])
def test_a_row_does_not_know_its_batch(dim: int) -> None:
    """Alone, in every batch size, at the front and at the back, beside NaN: the same bits from each operator."""
    weight, matrix, frequencies = torch.randn(dim), torch.randn(100, dim), torch.rand(6)
    one, zero, off = torch.ones(1), torch.zeros(1), torch.zeros(1, dtype=torch.int32)

    def run(x: Tensor, index: int) -> list[Tensor]:
        rows = x.shape[0]
        logits = native.linear(x, matrix)
        table = native.rope_table(torch.full((rows,), 77), frequencies)
        entropies = native.statistics(
            logits,
            Filters(0.7 * one.expand(rows).contiguous(), off.expand(rows), one.expand(rows), zero.expand(rows)),
            None,
            False,
            True,
        )
        outputs = (
            native.rms_norm(x, weight, 1e-6),
            native.silu_mul(x),
            native.qk_norm_rope(x, Rotation(weight[:12].contiguous(), weight[:12].contiguous(), table, 1, 1, 1e-6)),
            logits,
            *entropies,
        )
        return [out[index] for out in outputs]

    probe = wide(1, dim)
    expected = run(probe, 0)
    for rows in BATCHES:
        for index in {0, rows // 2, rows - 1}:
            batch = wide(rows, dim)
            batch[rows // 3] = torch.nan
            batch[index] = probe[0]
            assert all(map(same, run(batch, index), expected)), (rows, index)


def test_threads_and_pieces_do_not_change_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = wide(1100, 300), wide(200, 300)
    expected = native.linear(x, weight)
    assert same(native.linear(x[511:514], weight), expected[511:514])
    assert same(native.linear(x, weight[60:70].contiguous()), expected[:, 60:70])
    monkeypatch.setattr(native, "THREAD_WORK", 1)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert same(native.linear(x, weight), expected)


# ---- which path runs ----


def test_other_dtypes_and_the_forced_reference_take_the_reference_path() -> None:
    x, weight = torch.randn(3, 32), torch.randn(8, 32)
    assert ops.cpu_backend() == "native"
    assert same(ops.linear(x, weight), native.linear(x, weight))
    half = ops.linear(x.bfloat16(), weight.bfloat16())
    assert torch.equal(half, ops.linear.__wrapped__(x.bfloat16(), weight.bfloat16()))
    with using(None):
        assert ops.cpu_backend() == "reference"
        assert same(ops.silu_mul(x), ops.silu_mul.__wrapped__(x))


def test_operands_of_another_dtype_are_refused() -> None:
    x, half = torch.randn(3, 1, 16), torch.randn(3, 1, 16).bfloat16()
    by = ops.Packed(torch.tensor([0, 3], dtype=torch.int32), *torch.zeros(2, 1, dtype=torch.int32), 3)
    cache, slots = ops.KVPages(*torch.zeros(2, 1, 16, 1, 16)), torch.arange(3)
    for call in (
        lambda: ops.linear(x[:, 0], half[:, 0]),
        lambda: ops.rms_norm(x[:, 0], half[0, 0], 1e-6),
        lambda: ops.attention_packed(x, half, half, by),
        lambda: ops.attention_packed(x, x, x, by, ops.AttentionScores(half[:1, 0, 0])),
        lambda: ops.write_kv(x, half, cache, slots),
    ):
        with pytest.raises(TypeError, match=r"expected .*float32.*, got .*bfloat16"):
            call()


def test_inference_and_tracing_see_the_same_operator() -> None:
    x, weight = torch.randn(5, 32), torch.randn(32)
    expected = ops.rms_norm(x, weight, 1e-6)
    with torch.inference_mode():
        assert same(ops.rms_norm(x, weight, 1e-6), expected)
        graph = make_fx(lambda x, weight: ops.rms_norm(x, weight, 1e-6))(x, weight)
        assert same(graph(x, weight), expected)
    assert [n.target for n in graph.graph.nodes if n.op == "call_function"] == [torch.ops.lockstep.rms_norm.default]


def test_what_python_packs_fills_what_c_reads() -> None:
    words = {"attention": 25, "product": 12}  # of 8 bytes, in attention.c and linear.c; the others as in vector.h
    for name, (make, pack, error) in library.JOBS.items():
        assert pack.__self__.size == ctypes.sizeof(make.__self__) == 8 * words.get(name, 17)
        assert error == 8 * (words[name] - 1 if name in words else 3)


def test_a_library_of_other_sources_is_not_loaded(tmp_path: Path) -> None:
    folder = Path(native.__file__).parent
    for path in [*folder.glob("*.[ch]"), *folder.glob("_kernels*")]:
        shutil.copy(path, tmp_path)
    built = next(tmp_path.glob("_kernels*"))
    assert library.load(built) is not None
    (tmp_path / "rows.c").write_text((tmp_path / "rows.c").read_text() + "\n")
    assert library.load(built) is None
    assert library.load(tmp_path / "nothing.so") is None
    (tmp_path / "not_whole.so").touch()
    assert library.load(tmp_path / "not_whole.so") is None
