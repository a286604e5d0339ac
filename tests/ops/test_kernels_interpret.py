"""The Triton kernels on a CPU, under Triton's interpreter, against the reference path.

The interpreter has to be chosen before Triton is imported, so one test runs `Interpreted` in a process of its own. It
multiplies matrices with NumPy, in float32 alone (it takes bfloat16 words for integers); the tensor core's own bits are
the business of `tests/gpu`.
"""

import os
import sys

import numpy as np
import pytest
import torch
from processes import finished, run_interpreted

from lockstep import ops
from lockstep.ops.attention import reference as attention_reference
from lockstep.ops.logprobs import reference as logprobs_reference
from lockstep.ops.logprobs.philox import philox, sample_key
from lockstep.ops.records import ACTIVATIONS, Rotation

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    import triton
    import triton.language as tl

    from lockstep.ops.activation import triton as activation_triton
    from lockstep.ops.attention import triton as attention_triton
    from lockstep.ops.linear import triton as linear_triton
    from lockstep.ops.logprobs import triton as logprobs_triton
    from lockstep.ops.logprobs import triton_topk_topp
    from lockstep.ops.norm import triton as norm_triton
    from lockstep.ops.rope import triton as rope_triton

    @triton.jit
    def _words_kernel(key_ptr, position_ptr, words_ptr, QUADS: tl.constexpr):
        row = tl.program_id(0)
        words = logprobs_triton.philox_words(key_ptr + row * 4, tl.load(position_ptr + row), tl.arange(0, QUADS))
        tl.store(words_ptr + row * 4 * QUADS + tl.arange(0, 4 * QUADS), words.to(tl.int64))

    @triton.jit
    def _noise_kernel(words_ptr, noise_ptr, COUNT: tl.constexpr):
        column = tl.arange(0, COUNT)
        words = tl.load(words_ptr + column).to(tl.uint32)
        tl.store(noise_ptr + column, logprobs_triton.gumbel(words))
        tl.store(noise_ptr + COUNT + column, logprobs_triton.gumbel_bound(words))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality of words; NaN equals itself and -0 is not 0."""
    words = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(words), b.contiguous().view(words))


def test_kernels_under_the_interpreter():
    run_interpreted(__file__)


def test_operators_leave_triton_unimported():
    code = "import sys, lockstep.ops; sys.exit('triton' in sys.modules)"
    assert finished([sys.executable, "-c", code]).returncode == 0


# Packed segments (start, own length, prefix start, prefix length): a prompt, two completions that share all and part of
# it, an empty segment. Rows 127 to 129 are padding.
CU_SEQLENS = torch.tensor([0, 70, 100, 127, 127], dtype=torch.int32)
PREFIX_START = torch.tensor([0, 0, 5, 0], dtype=torch.int32)
PREFIX_LEN = torch.tensor([0, 70, 12, 0], dtype=torch.int32)
PACKED = ops.Packed(CU_SEQLENS, PREFIX_START, PREFIX_LEN, 100)
ROWS = 130


def qkv(rows_: int, heads: int, kv_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views into one buffer, as the model hands them over."""
    fused = torch.randn(rows_, heads + 2 * kv_heads, head_dim)
    return fused[:, :heads], fused[:, heads:-kv_heads], fused[:, -kv_heads:]


def paged_cache(k: torch.Tensor, v: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Caches that hold one sequence in permuted pages, NaN everywhere else, and its block table [1, pages]."""
    pages = -(-k.shape[0] // page_size)
    table = torch.randperm(2 * pages)[:pages]
    caches = []
    for x in (k, v):
        cache = torch.full((2 * pages * page_size, *x.shape[1:]), torch.nan)
        position = torch.arange(x.shape[0])
        cache[table[position // page_size] * page_size + position % page_size] = x
        caches.append(cache.view(2 * pages, page_size, *x.shape[1:]))
    return *caches, table.to(torch.int32).unsqueeze(0)


def paged_chunks(q, k, v, page_size: int, cuts: list[int]) -> torch.Tensor:
    """The sequence's attention, its queries computed in chunks that end at `cuts`, each with the context so far."""
    chunks, start = [], 0
    for end in cuts:
        k_cache, v_cache, table = paged_cache(k[:end], v[:end], page_size)
        cu_seqlens, context = torch.tensor([0, end - start]).int(), torch.tensor([end]).int()
        chunks.append(
            attention_triton.paged(
                q[start:end], ops.KVPages(k_cache, v_cache), ops.Paged(table, cu_seqlens, context, end - start, len(q))
            )
        )
        start = end
    return torch.cat(chunks)


def packed_alone(q, k, v) -> torch.Tensor:
    """One segment without a prefix."""
    zero = torch.zeros(1, dtype=torch.int32)
    return attention_triton.packed(q, k, v, ops.Packed(torch.tensor([0, len(q)]).int(), zero, zero, len(q)))[0]


# temperature, top-k, top-p, min-p
FILTERS = [
    (1.0, 0, 1.0, 0.0),
    (0.8, 0, 0.95, 0.0),
    (0.5, 5, 1.0, 0.0),
    (2.0, 0, 1.0, 0.1),
    (0.0, 3, 0.5, 0.0),
    (1.3, 10, 0.3, 0.2),
    (1.0, 1, 1.0, 0.0),
]


def filter_columns() -> tuple[torch.Tensor, ...]:
    temperature, top_k, top_p, min_p = zip(*FILTERS, strict=True)
    return torch.tensor(temperature), torch.tensor(top_k, dtype=torch.int32), torch.tensor(top_p), torch.tensor(min_p)


def logits(vocabulary: int) -> torch.Tensor:
    """A row a filter; halves, so that ties abound at every filter's edge."""
    return (torch.randn(len(FILTERS), vocabulary) * 6).round() / 2


class Interpreted:
    @pytest.fixture(autouse=True)
    def seed(self):
        torch.manual_seed(0)

    @pytest.fixture
    def exact_matmul(self, monkeypatch):
        """Products that do not depend on where in the block a row stands, as NumPy's own do: rounded from float64."""

        def matmul(a, b, dtype):
            return (a.astype(np.float64) @ b.astype(np.float64)).astype(dtype)

        monkeypatch.setattr(np, "matmul", matmul)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("width", [96, 128, 33])
    def test_rms_norm(self, dtype, width):
        x, weight = torch.randn(5, width).to(dtype), torch.randn(width).to(dtype)
        out = norm_triton.rms_norm(x, weight, 1e-6)
        torch.testing.assert_close(out, ops.rms_norm.__wrapped__(x, weight, 1e-6).to(dtype))
        view = torch.cat((torch.full((5, 1), torch.nan).to(dtype), x), dim=1)[:, 1:]
        assert same_bits(norm_triton.rms_norm(view, weight, 1e-6), out)
        assert same_bits(norm_triton.rms_norm(x[2:3], weight, 1e-6), out[2:3])
        one_more = norm_triton.rms_norm(x, weight, 1e-6, 1.0)
        assert same_bits(one_more, norm_triton.rms_norm(x, weight.float() + 1, 1e-6)), "the sum is float32"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # it does not round to bfloat16 as a GPU does
    def test_norm_add(self, dtype):
        x, weight, residual = (torch.randn(*shape).to(dtype) for shape in ((5, 96), (96,), (5, 192)))
        residual = residual[:, 96:]
        expected = residual + norm_triton.rms_norm(x, weight, 1e-6, 1.0)
        assert same_bits(norm_triton.norm_add(x, weight, residual, 1e-6, 1.0), expected)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "norm"), [(4, 2, 32, True), (3, 1, 24, False)])
    def test_qk_norm_rope(self, dtype, heads, kv_heads, head_dim, norm):
        qkv_TE = torch.randn(7, (heads + 2 * kv_heads) * head_dim).to(dtype)
        weights = [torch.randn(head_dim).to(dtype) if norm else None for _ in range(2)]
        angles = torch.rand(7, head_dim // 2) * 100
        by = Rotation(*weights, torch.cat((angles.cos(), angles.sin()), dim=1), heads, kv_heads, 1e-6)
        out = rope_triton.qk_norm_rope(qkv_TE, by)
        torch.testing.assert_close(out, ops.qk_norm_rope.__wrapped__(qkv_TE, by))
        more = by._replace(q_weight_H=weights[0].float() + 1, k_weight_H=weights[1].float() + 1) if norm else by
        assert same_bits(rope_triton.qk_norm_rope(qkv_TE, by, 1.0), rope_triton.qk_norm_rope(qkv_TE, more))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_silu_mul(self, dtype):
        gate_up = (torch.randn(3, 2 * 1100) * 30).to(dtype)
        gate_up[0, :2] = torch.tensor([torch.nan, torch.inf])
        for activation in ACTIVATIONS:
            out, expected = (
                activation_triton.silu_mul(gate_up, activation),
                ops.silu_mul.__wrapped__(gate_up, activation),
            )
            torch.testing.assert_close(out, expected, equal_nan=True)

    @pytest.mark.parametrize(
        ("m", "n", "k"), [(1, 130, 96), (20, 64, 256), (40, 129, 72), (130, 40, 64), (520, 300, 65), (130, 1, 64)]
    )
    def test_linear(self, m, n, k):
        x, weight = torch.randn(m, 2 * k)[:, k:], torch.randn(n, k)
        out = linear_triton.chain(x, weight, "linear_fp32")
        assert out.shape == (m, n) and out.dtype == torch.float32
        torch.testing.assert_close(out, (x.double() @ weight.double().t()).float(), atol=1e-4, rtol=1e-5)
        x, weight = x.bfloat16(), weight.bfloat16()
        out = linear_triton.chain(x, weight, "linear_fp32")
        torch.testing.assert_close(linear_triton.chain(x, weight), out.bfloat16())  # the interpreter truncates

    @pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 24), (4, 4, 64), (5, 1, 16)])
    def test_packed_attention(self, heads, kv_heads, head_dim):
        q, k, v = qkv(ROWS, heads, kv_heads, head_dim)
        out = attention_triton.packed(q, k, v, PACKED)[0]
        expected = attention_reference.packed(q, k, v, PACKED)
        torch.testing.assert_close(out, expected)
        assert same_bits(out[127:], torch.zeros(3, heads, head_dim))

    def test_shared_prefix_is_a_repeated_prefix(self, exact_matmul):
        q, k, v = qkv(ROWS, 6, 2, 32)
        out = attention_triton.packed(q, k, v, PACKED)[0]
        for s, (first, end) in enumerate([(0, 70), (70, 100), (100, 127)]):
            shared = torch.arange(PREFIX_START[s], PREFIX_START[s] + PREFIX_LEN[s])
            index = torch.cat((shared, torch.arange(first, end)))
            alone = packed_alone(q[index], k[index], v[index])
            assert same_bits(out[first:end], alone[len(shared) :])

    @pytest.mark.parametrize(("length", "page_size"), [(63, 16), (64, 4), (65, 64), (131, 7), (131, 256)])
    def test_decode_is_chunked_prefill_is_packed(self, exact_matmul, length, page_size):
        q, k, v = qkv(length, 6, 2, 32)
        whole = packed_alone(q, k, v)
        assert same_bits(paged_chunks(q, k, v, page_size, [length]), whole)
        assert same_bits(paged_chunks(q, k, v, page_size, [length // 3, length - 1, length]), whole)

    def test_paged_batch(self):
        q, k, v = qkv(90, 4, 2, 16)
        k_cache, v_cache, table = paged_cache(k, v, 16)
        tables = torch.cat((table, table.flip(1), torch.zeros_like(table)))
        cu_seqlens, context = torch.tensor([0, 1, 31, 31]).int(), torch.tensor([65, 90, 0]).int()
        cache, by = ops.KVPages(k_cache, v_cache), ops.Paged(tables, cu_seqlens, context, 30, 90)
        out = attention_triton.paged(q[:33], cache, by)
        expected = attention_reference.paged(q[:33], cache, by)
        torch.testing.assert_close(out, expected, equal_nan=True)
        assert not out[:1].isnan().any() and same_bits(out[31:], torch.zeros(2, 4, 16))

    @pytest.mark.parametrize("vocabulary", [37, 203])
    def test_statistics(self, vocabulary, monkeypatch):
        monkeypatch.setattr(triton_topk_topp, "MAX_BLOCK", 128)
        x, filters = logits(vocabulary), ops.Filters(*filter_columns())
        out = logprobs_triton.statistics(x, filters, None, True, True)
        expected = logprobs_reference.statistics(x, filters, None, True, True)
        torch.testing.assert_close(out[0], expected[0])
        torch.testing.assert_close(out[1], expected[1])
        torch.testing.assert_close(out[3], expected[3])
        z = x / logprobs_reference.divisor(filters.temperature_C).unsqueeze(1)
        kept, expected_kept = z >= out[2].unsqueeze(1), z >= expected[2].unsqueeze(1)
        assert kept.equal(expected_kept)
        filtered = ~kept.all(dim=1)
        assert filtered[1:].all() and same_bits(out[2][filtered] + 0.0, expected[2][filtered] + 0.0)

        plain = logprobs_triton.statistics(x, filters, None, False, True)
        assert same_bits(plain[0], out[0]) and same_bits(plain[1][:1], out[1][:1])
        assert same_bits(plain[1][:1], plain[0][:1]), "temperature 1 without filters is the model's own distribution"
        alone = logprobs_triton.statistics(x[5:6], ops.Filters(*(c[5:6] for c in filters)), None, True, True)
        assert all(same_bits(a, o[5:6]) for a, o in zip(alone, out, strict=True))

    def test_statistics_over_a_given_support(self):
        x, filters = logits(203), ops.Filters(*filter_columns())
        bits = logprobs_reference.pack_support(torch.rand(x.shape) < 0.3)
        out = logprobs_triton.statistics(x, filters, bits, True, True)
        expected = logprobs_reference.statistics(x, filters, bits, True, True)
        for a, e in zip(out, expected, strict=True):
            torch.testing.assert_close(a, e)

    def test_extreme_logits(self):
        """Part of the vocabulary at -inf (a padded LM head), whole blocks of it, and logits that overflow exp."""
        x = torch.randn(1, 300) * 1e4
        x[:, 40:200] = -torch.inf
        one = torch.ones(1)
        filters = ops.Filters(one, torch.zeros(1, dtype=torch.int32), 0.9 * one, 0 * one)
        out = logprobs_triton.statistics(x, filters, None, True, True)
        finite = x[:, ~x.isinf()[0]]
        torch.testing.assert_close(out[0], finite.logsumexp(1))
        torch.testing.assert_close(out[2], finite.amax(1))
        torch.testing.assert_close(out[3], torch.zeros(1), atol=1e-3, rtol=0)

    def test_random_words(self):
        key = torch.tensor([sample_key(2**40 + 7, 1, 3, 5, i) for i in range(2)])
        position = torch.tensor([0, 4095])
        words = torch.empty(2, 64, dtype=torch.int64)
        _words_kernel[(2,)](key, position, words, QUADS=16)
        for row in range(2):
            k0, k1, c2, c3 = key[row].tolist()
            expected = [w for quad in range(16) for w in philox(int(position[row]), quad, c2, c3, k0, k1)]
            assert words[row].tolist() == expected

    def test_noise(self):
        """The largest noise comes from the smallest words, where 1 - u rounds."""
        words = torch.cat((2 ** torch.arange(32), torch.arange(16), 2**32 - 2 ** torch.arange(16)))
        noise, bound = torch.empty(2, 64)
        _noise_kernel[(1,)](words, noise, COUNT=64)
        uniform = ((words.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24).double()
        torch.testing.assert_close(noise, (-(-torch.log1p(-uniform)).log()).float(), atol=2e-6, rtol=1e-6)
        assert (bound >= noise).all() and (bound[16:24] - noise[16:24]).max() < 0.07, "a bound, close for small words"

    @pytest.mark.parametrize("block", [64, 2048])
    def test_draw(self, block, monkeypatch):
        monkeypatch.setattr(triton_topk_topp, "MAX_BLOCK", 128)
        monkeypatch.setattr(logprobs_triton, "DRAW_BLOCK", block)
        x, filters = logits(203).repeat(4, 1), ops.Filters(*(c.repeat(4) for c in filter_columns()))
        temperature = filters.temperature_C
        threshold = logprobs_reference.statistics(x, filters, None, True, False).threshold_C
        key = torch.tensor([sample_key(1, 0, 2, 3, i) for i in range(len(x))])
        keys = ops.SampleKeys(key, torch.arange(len(x)) + 100)
        token = logprobs_triton.draw(x, temperature, threshold, keys, True)
        assert token.equal(logprobs_reference.draw(x, temperature, threshold, keys, True))
        assert token[4] == (x[4] == x[4].max()).nonzero()[0, 0], "greedy takes the first of equals"
        own = ops.SampleKeys(*(x[9:10] for x in keys))
        alone = logprobs_triton.draw(x[9:10], temperature[9:10], threshold[9:10], own, False)
        assert alone.equal(token[9:10])
