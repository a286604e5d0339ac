"""Splits, groups of sequences and single queries in the attention kernels, bit for bit, under Triton's interpreter.

As in `test_kernels_interpret`, one test runs `Interpreted` in a process of its own, in float32. Splits are 128 keys
there, so that short sequences have several.
"""

import os

import numpy as np
import pytest
import torch
from processes import run_interpreted
from torch import Tensor

from lockstep.ops.attention import reference as attention_reference
from lockstep.ops.records import (
    NO_GROUPS,
    PLAIN,
    AttentionScores,
    Contexts,
    KVPages,
    Packed,
    Paged,
    PrefixGroups,
    Rotation,
)

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton
    import triton.language as tl

    from lockstep.ops.attention import triton as attention_triton
    from lockstep.ops.attention import triton_decode, triton_tiles
    from lockstep.ops.rope import triton as rope_triton

    @triton.jit
    def _row_sum_kernel(p_ptr, sum_ptr):
        m = tl.arange(0, 16)
        p_ML = tl.load(p_ptr + m[:, None] * 64 + tl.arange(0, 64)[None, :])
        tl.store(sum_ptr + m, triton_tiles.row_sum(p_ML, 16))


LENGTH, SPLIT, PAGE_SIZE = 300, 128, 16
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
SINKS = torch.tensor([0.5, -3.0, 4.0, 30.0])
SCORES = {
    "window of 20": AttentionScores(window=20),
    "all": AttentionScores(SINKS, 150, 0.4, 5.0),
}
ROWS = [0, 63, 64, 127, 128, 129, 200, 255, 256, 257, 299]


def test_kernels_under_the_interpreter():
    run_interpreted(__file__)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Pages:
    """Sequences of wide exponents in shuffled pages, NaN elsewhere; they have their first `shared` positions, and the
    whole pages of those, in common."""

    def __init__(self, sequences: int, shared: int, scores: AttentionScores = PLAIN) -> None:
        self.scores = scores
        count = -(-LENGTH // PAGE_SIZE)
        self.table = torch.randperm(sequences * count).int().view(sequences, count)
        self.table[:, : shared // PAGE_SIZE] = self.table[0, : shared // PAGE_SIZE].clone()
        self.q, self.k, self.v = (torch.empty(sequences, LENGTH, h, HEAD_DIM) for h in (HEADS, KV_HEADS, KV_HEADS))
        for x in (self.q, self.k, self.v):
            x.copy_(torch.randn(x.shape) * torch.exp(torch.randn(x.shape)))
        position = torch.arange(LENGTH)
        self.k_cache, self.v_cache = caches = [
            torch.full((sequences * count, PAGE_SIZE, KV_HEADS, HEAD_DIM), torch.nan) for _ in range(2)
        ]
        for x, cache in zip((self.k, self.v), caches, strict=True):
            x[:, :shared] = x[0, :shared].clone()
            for s in range(sequences):
                cache[self.table[s, position // PAGE_SIZE].long(), position % PAGE_SIZE] = x[s]

    def packed(self, sequence: int = 0) -> Tensor:
        q, k, v = (x[sequence] for x in (self.q, self.k, self.v))
        by = Packed(int32(0, LENGTH), int32(0), int32(0), LENGTH)
        return attention_triton.packed(q, k, v, by, self.scores)[0]

    def prefilled(self, cuts: list[int]) -> Tensor:
        chunks = [
            attention_triton.paged(
                self.q[0, start:end],
                KVPages(self.k_cache, self.v_cache),
                Paged(self.table[:1], int32(0, end - start), int32(end), end - start, LENGTH),
                scores=self.scores,
            )
            for start, end in zip([0, *cuts], [*cuts, LENGTH], strict=True)
        ]
        return torch.cat(chunks)

    def decoded(self, sequences: list[int], rows: list[int], *groups: Tensor) -> Tensor:
        """The queries at `rows` of `sequences`, one batch."""
        q = self.q[sequences, rows]
        starts, context = torch.arange(len(rows) + 1).int(), int32(*rows) + 1
        by = Paged(self.table[sequences], starts, context, 1, LENGTH)
        return attention_triton.paged(q, KVPages(self.k_cache, self.v_cache), by, PrefixGroups(*groups), self.scores)

    def beside_a_prompt(self, sequences: list[int], rows: list[int], groups: PrefixGroups) -> tuple[Tensor, Tensor]:
        """The same, and in the same batch the first sequence's queries from 90 on in pieces, and padding; then what
        those are."""
        cuts, single = [90, 154, 200, 200], len(rows)
        places = torch.tensor([*range(single), *(single + cut - cuts[0] for cut in cuts)]).int()
        table = self.table[sequences + [0] * (len(cuts) - 1)]
        by = Paged(table, places, int32(*(row + 1 for row in rows), *cuts[1:]), 64, LENGTH)
        q = torch.cat((self.q[sequences, rows], self.q[0, cuts[0] : cuts[-1]], torch.full((5, HEADS, HEAD_DIM), 1.0)))
        out = attention_triton.paged(q, KVPages(self.k_cache, self.v_cache), by, groups, self.scores)
        return out[:single], out[single:]


class Interpreted:
    @pytest.fixture(autouse=True)
    def exact(self, monkeypatch):
        """Short splits, and products that do not depend on a row's place in its block: rounded from float64."""

        def matmul(a, b, dtype):
            return (a.astype(np.float64) @ b.astype(np.float64)).astype(dtype)

        torch.manual_seed(0)
        torch.use_deterministic_algorithms(True)  # fills new memory with NaN
        monkeypatch.setattr(np, "matmul", matmul)
        for module in (attention_triton, triton_decode, attention_reference):
            monkeypatch.setattr(module, "KEY_SPLIT", SPLIT)
        yield
        torch.use_deterministic_algorithms(False)

    def test_row_sum_has_the_order_that_it_says(self):
        p = torch.rand(16, 64) * torch.exp(3 * torch.randn(16, 64))
        out = torch.empty(16)
        _row_sum_kernel[(1,)](p, out)
        partial = [torch.zeros(16) for _ in range(4)]
        for key in range(64):
            partial[key % 8 // 2] = partial[key % 8 // 2] + p[:, key]
        assert same_bits(out, (partial[0] + partial[2]) + (partial[1] + partial[3]))

    def test_decode_is_chunked_prefill_is_packed_across_splits(self, monkeypatch):
        pages = Pages(1, 0)
        whole = pages.packed()
        expected = attention_reference.packed(
            pages.q[0], pages.k[0], pages.v[0], Packed(int32(0, LENGTH), int32(0), int32(0), LENGTH)
        )
        torch.testing.assert_close(whole, expected, atol=1e-5, rtol=1e-4)
        assert same_bits(pages.decoded([0] * len(ROWS), ROWS), whole[ROWS])
        assert same_bits(pages.prefilled([]), whole)
        assert same_bits(pages.prefilled([100, 131, 256]), whole)

        monkeypatch.setattr(attention_triton, "LONG_CONTEXT", 0)  # tiles without masks have a loop of their own
        assert same_bits(pages.packed(), whole)
        assert same_bits(pages.prefilled([62, 190]), whole), "a first query that sees all keys of a tile but one"
        monkeypatch.setattr(attention_triton, "SMALL_TILE", attention_triton.AttentionTile(32, 4, 1))
        assert same_bits(pages.packed(), whole)

        monkeypatch.setattr(attention_triton, "KEY_SPLIT", 1 << 20)
        one_split = pages.packed()
        assert same_bits(one_split[:SPLIT], whole[:SPLIT]), "one split needs no merging"
        assert not same_bits(one_split[SPLIT:], whole[SPLIT:]), "CONTROL: other splits are another sum"

    @pytest.mark.parametrize("name", SCORES)
    def test_windows_sinks_and_caps_are_the_same_everywhere(self, name, monkeypatch):
        pages = Pages(1, 0, SCORES[name])
        whole, layout = pages.packed(), Packed(int32(0, LENGTH), int32(0), int32(0), LENGTH)
        expected = attention_reference.packed(pages.q[0], pages.k[0], pages.v[0], layout, SCORES[name])
        torch.testing.assert_close(whole, expected, atol=1e-5, rtol=1e-4)
        assert same_bits(pages.decoded([0] * len(ROWS), ROWS), whole[ROWS])
        assert same_bits(pages.prefilled([131, 190]), whole)
        monkeypatch.setattr(attention_triton, "LONG_CONTEXT", 0)  # tiles without masks have a loop of their own
        monkeypatch.setattr(attention_triton, "SMALL_TILE", attention_triton.AttentionTile(32, 4, 1))
        assert same_bits(pages.packed(), whole)

        row = 200 + SCORES[name].window % 3
        pages.table[0, : SCORES[name].first_key(row) // PAGE_SIZE] = 10**6  # those pages are gone
        assert same_bits(pages.decoded([0], [row]), whole[[row]])

    def test_groups_with_windows_change_no_bit(self):
        pages = Pages(4, 270, SCORES["all"])
        sequences, rows = [0, 3, 1, 2, 0], [270, 299, 285, 271, 299]
        alone = pages.decoded(sequences, rows)
        groups = torch.tensor([[0, 2, 3, 1, 4, -1]], dtype=torch.int32), int32(*[270] * 5)
        assert same_bits(pages.decoded(sequences, rows, *groups), alone)
        beside = pages.beside_a_prompt(sequences, rows, PrefixGroups(*groups))
        assert all(map(same_bits, beside, pages.beside_a_prompt(sequences, rows, NO_GROUPS)))
        assert same_bits(beside[0], alone)

    @pytest.mark.parametrize("scores", [PLAIN, SCORES["all"]])
    def test_rows_of_one_token_beside_prompts_have_their_bits(self, scores):
        """With groups another kernel does them, grouped or not, at rest or not; and what is padding stays zero."""
        pages = Pages(4, 145, scores)
        sequences, rows = [0, 3, 1, 2, 0], [270, 0, 285, 146, 20]  # the second and the last one are at rest
        groups = torch.tensor([[1, 0, 2, 3, -1], [-1] * 5], dtype=torch.int32), int32(144, 144, 144, 144, 0)
        singles, prompt = pages.beside_a_prompt(sequences, rows, PrefixGroups(*groups))
        busy, alone = [0, 2, 3, 4], pages.beside_a_prompt(sequences, rows, NO_GROUPS)
        assert same_bits(singles[busy], alone[0][busy]) and same_bits(prompt, alone[1])
        assert same_bits(singles[busy], pages.decoded(sequences, rows)[busy])
        assert same_bits(prompt[:110], pages.packed()[90:200]) and not prompt[110:].any()

    @pytest.mark.parametrize(("shared", "max_rows"), [(63, 64), (145, 16), (270, 64)])
    def test_groups_change_no_bit(self, shared, max_rows, monkeypatch):
        tile = triton_tiles.AttentionTile(max_rows, 4, 1)
        monkeypatch.setattr(triton_decode, "_choose_group_tile", lambda *_: tile)
        pages = Pages(4, shared)
        sequences, rows = [0, 3, 1, 2, 0, 1, 3], [270, 299, 285, 271, 299, 276, 5]
        alone = pages.decoded(sequences, rows)
        groups = torch.tensor([[0, 2, 3, 1, 4, -1, -1, -1, -1, -1], [-1] * 10], dtype=torch.int32)
        shared_len = torch.zeros(len(rows), dtype=torch.int32)
        shared_len[groups[groups >= 0].long()] = shared
        assert same_bits(pages.decoded(sequences, rows, groups, shared_len), alone)
        assert same_bits(alone[1], pages.packed(3)[299])

    def test_a_group_s_pages_are_read_once(self):
        """Only the first member's table is looked at for what is shared: the others' entries there may be anything."""
        pages = Pages(3, 128)
        alone = pages.decoded([0, 1, 2], [299, 280, 200])
        pages.table[1:, : 128 // PAGE_SIZE] = 0
        assert not same_bits(pages.decoded([0, 1, 2], [299, 280, 200]), alone), "CONTROL: without groups it matters"
        grouped = pages.decoded([0, 1, 2], [299, 280, 200], torch.tensor([[0, 1, 2, -1]]).int(), int32(128, 128, 128))
        assert same_bits(grouped, alone)

    @pytest.mark.parametrize(
        ("with_norms", "scores", "offset"),
        [(True, PLAIN, 0.0), (False, PLAIN, 0.0), (False, SCORES["all"], 0.0), (True, SCORES["all"], 1.0)],
    )
    def test_a_projection_decodes_as_separate_kernels_do(self, with_norms, scores, offset):
        """Norm, rotation and the write to the cache inside: the words of the cache and of the output."""
        sequences, positions = [0, 3, 1, 2], [270, 299, 255, 256]
        pages = Pages(4, 0)
        qkv = torch.randn(4, (HEADS + 2 * KV_HEADS) * HEAD_DIM) * torch.exp(torch.randn(4, 1))
        norms = [torch.randn(HEAD_DIM) if with_norms else None for _ in range(2)]
        angles = torch.rand(4, HEAD_DIM // 2) * 100
        rotation = Rotation(*norms, torch.cat((angles.cos(), angles.sin()), dim=1), HEADS, KV_HEADS, 1e-6)
        table, context, starts = pages.table[sequences], int32(*positions) + 1, torch.arange(5).int()
        page = table.gather(1, torch.tensor(positions).unsqueeze(1) // PAGE_SIZE).squeeze(1).long()
        slots = page * PAGE_SIZE + torch.tensor(positions) % PAGE_SIZE
        caches, expected = ([pages.k_cache.clone(), pages.v_cache.clone()] for _ in range(2))
        for cache in (*caches, *expected):
            cache.view(-1, KV_HEADS, HEAD_DIM)[slots] = torch.nan
        q = rope_triton.qk_norm_rope_write_kv(qkv, rotation, expected, slots, offset)
        by = Paged(table, starts, context, 1, LENGTH)
        alone = attention_triton.paged(q, KVPages(*expected), by, PrefixGroups(), scores)
        cache, contexts = KVPages(*caches), Contexts(table, context, LENGTH)
        for _ in range(2):  # writing again changes nothing
            out = triton_decode.attention_decode(qkv, rotation, cache, slots, contexts, PrefixGroups(), scores, offset)
            assert same_bits(out, alone) and not out.isnan().any()
            assert all(same_bits(a, b) for a, b in zip(caches, expected, strict=True))
