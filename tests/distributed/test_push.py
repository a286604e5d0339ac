"""Words pushed into other ranks' memory: the kernel under Triton's interpreter, its ranks one after another."""

from __future__ import annotations

import os
import threading
from typing import Literal

import pytest
import torch
from processes import run_interpreted
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") == "1":
    from lockstep.distributed.push import triton as kernels
    from lockstep.distributed.push.memory import SharedMemory
    from lockstep.ops.attention import triton_decode as attention
    from lockstep.ops.linear import triton as products
    from lockstep.ops.linear.choice import Choice
    from lockstep.ops.records import PARITIES, SLOT, Contexts, Epilogue, KVPages, Rotation

SHAPES = [
    (1, 8, torch.bfloat16),
    (8, 5, torch.bfloat16),
    (64, 96, torch.float32),
    (3, 3, torch.int32),
    (2, 7, torch.int64),
]


def test_kernel_under_the_interpreter() -> None:
    run_interpreted(__file__)


def group(ranks: int) -> list[SharedMemory]:
    """The memory of ranks of this process."""
    slots = torch.full((ranks, PARITIES * ranks * SLOT), 0x7F7F7F7F7F7F7F7F)
    late = torch.zeros(1, dtype=torch.int64)
    pointers = torch.tensor([*(x.data_ptr() for x in slots), late.data_ptr()])
    return [
        SharedMemory(rank, ranks, 0, pointers, torch.zeros(2, dtype=torch.int64), late, slots) for rank in range(ranks)
    ]


def words(rank: int, shape: tuple[int, int, torch.dtype], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    rows, width, dtype = shape
    if dtype.is_floating_point:
        return torch.randn(rows, width, generator=generator).to(dtype)
    return torch.randint(-(1 << 31), (1 << 31) - 1, (rows, width), generator=generator).to(dtype)


class Interpreted:
    @pytest.mark.parametrize("ranks", [2, 4])
    def test_columns_of_all_ranks_in_launches_that_follow_one_another(self, ranks: int) -> None:
        memories = group(ranks)
        for seed, shape in enumerate(SHAPES):
            own = [words(rank, shape, seed) for rank in range(ranks)]
            for memory, x in zip(memories, own, strict=True):
                kernels.launch_push(x, False, memory, take=False)
            for memory, x in zip(memories, own, strict=True):
                found = kernels.launch_push(x, False, memory, store=False)
                assert torch.equal(found, torch.cat(own, dim=1)), (shape, memory.rank)
        assert [memory.state.tolist() for memory in memories] == [[len(SHAPES), 0]] * ranks

    @pytest.mark.parametrize("ranks", [2, 4])
    def test_rows_go_to_their_owners(self, ranks: int) -> None:
        memories = group(ranks)
        for seed, (rows, width, dtype) in enumerate(SHAPES):
            own = [words(rank, (rows * ranks, width, dtype), seed) for rank in range(ranks)]
            for memory, x in zip(memories, own, strict=True):
                kernels.launch_push(x, True, memory, take=False)
            for memory, x in zip(memories, own, strict=True):
                share = slice(memory.rank * rows, (memory.rank + 1) * rows)
                expected = torch.cat([other[share] for other in own], dim=1)
                assert torch.equal(kernels.launch_push(x, True, memory, store=False), expected)

    def test_a_rank_that_is_a_launch_ahead_changes_nothing_that_is_still_to_be_read(self) -> None:
        ahead, behind = group(2)
        shape = (16, 24, torch.bfloat16)
        first, second = ([words(rank, shape, seed) for rank in range(2)] for seed in (0, 1))
        for memory in (ahead, behind):
            kernels.launch_push(first[memory.rank], False, memory, take=False)
        kernels.launch_push(first[0], False, ahead, store=False)
        kernels.launch_push(second[0], False, ahead, take=False)
        assert torch.equal(kernels.launch_push(first[1], False, behind, store=False), torch.cat(first, dim=1))
        kernels.launch_push(second[1], False, behind, take=False)
        for memory in (ahead, behind):
            found = kernels.launch_push(second[memory.rank], False, memory, store=False)
            assert torch.equal(found, torch.cat(second, dim=1))

    @pytest.mark.parametrize("kind", ["linear_add", "norm_gate_up"])
    @pytest.mark.parametrize("ranks", [2, 4])
    def test_a_product_stores_its_words(self, ranks: int, kind: Literal["linear_add", "norm_gate_up"]) -> None:
        memories, tile = group(ranks), Choice("pipelined", 16, 16, 32, 4, 3)
        for seed, (rows, columns) in enumerate(((1, 16), (17, 40), (5, 18))):  # tiles that end within, and odd pairs
            x, residual = (words(0, (rows, width, torch.bfloat16), seed) for width in (64, columns))
            wide = columns * (2 if kind == "norm_gate_up" else 1)
            own = []
            for memory in memories:
                weight = words(memory.rank, (wide, 64, torch.bfloat16), seed)
                operands = kind, tile, x, weight, residual if kind == "linear_add" else None
                own.append(products.run(*operands, Epilogue(peers=memory.peers)))
                assert torch.equal(own[-1], products.run(*operands))
            for memory in memories:
                found = kernels.launch_push(own[memory.rank], False, memory, store=False)
                assert torch.equal(found, torch.cat(own, dim=1))

    def test_a_rank_may_push_whole_what_others_store_in_their_products(self) -> None:
        memories, tile = group(2), Choice("pipelined", 16, 16, 32, 4, 3)
        for seed, whole in enumerate((1, 0, 1)):
            x, weights = (
                words(0, (5, 64, torch.bfloat16), seed),
                [words(i, (18, 64, torch.bfloat16), seed) for i in (0, 1)],
            )
            own = [products.run("linear", tile, x, weight) for weight in weights]
            products.run("linear", tile, x, weights[1 - whole], None, Epilogue(peers=memories[1 - whole].peers))
            for rank, store in ((whole, True), (1 - whole, False)):
                found = kernels.launch_push(own[rank], False, memories[rank], store=store)
                assert torch.equal(found, torch.cat(own, dim=1))

    def test_what_takes_words_is_released_once_the_number_of_launches_is_known(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (memory, _), tile, order = group(2), Choice("pipelined", 16, 16, 32, 4, 3), list[str]()
        monkeypatch.setattr(kernels.pdl, "options", lambda *_, **__: {"PDL": True})
        monkeypatch.setattr(kernels.pdl, "gdc_launch_dependents", lambda: order.append("release"))
        monkeypatch.setattr(kernels.pdl, "gdc_wait", lambda: order.append("wait"))
        x = words(0, (1, 32, torch.bfloat16), 0)
        products.run("linear", tile, x, words(0, (16, 32, torch.bfloat16), 0), None, Epilogue(peers=memory.peers))
        assert order[:2] == ["wait", "release"]
        order.clear()
        kernels.launch_push(x, False, memory, take=False)
        assert order == ["wait", "release"] * 2

    @pytest.mark.parametrize("split", [4096, 64])  # of keys: contexts of one and of two
    def test_attention_stores_its_words(self, split: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(attention, "KEY_SPLIT", split)
        memories, (rows, heads, head_dim, page, pages) = group(2), (3, 2, 16, 16, 8)
        table = torch.arange(rows * pages, dtype=torch.int32).view(rows, pages)
        context, cos_sin = torch.tensor([5, 64, 100], dtype=torch.int32), words(7, (rows, head_dim, torch.float32), 0)
        slots = torch.arange(rows) * pages * page + context - 1
        own = []
        for memory in memories:
            rotation = Rotation(None, None, cos_sin, heads, 1, 1e-6)
            caches = words(memory.rank, (2 * rows * pages * page, head_dim, torch.float16), 3)
            qkv = words(memory.rank, (rows, (heads + 2) * head_dim, torch.float16), 4)
            cache = KVPages(*caches.view(2, rows * pages, page, 1, head_dim))
            arguments = qkv, rotation, cache, slots, Contexts(table, context, pages * page)
            own.append(attention.attention_decode(*arguments, peers=memory.peers).flatten(1))
            assert torch.equal(own[-1], attention.attention_decode(*arguments).flatten(1))
        for memory in memories:
            found = kernels.launch_push(own[memory.rank], False, memory, store=False)
            assert torch.equal(found, torch.cat(own, dim=1))

    def test_rows_of_any_stride_are_pushed_whole(self) -> None:
        memories = group(2)
        own = [words(rank, (1, 7, torch.bfloat16), 0)[:, :6] for rank in range(2)]  # as contiguous as one row is
        for memory, x in zip(memories, own, strict=True):
            kernels.launch_push(x, False, memory, take=False)
        assert torch.equal(kernels.launch_push(own[0], False, memories[0], store=False), torch.cat(own, dim=1))

    def test_nothing_is_no_launch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        (memory, _), moved = group(2), []
        monkeypatch.setattr(kernels, "shared_memory", lambda _: memory)
        monkeypatch.setattr(kernels, "by_collective", lambda x, *_: moved.append(x.shape))
        kernels.push_columns(torch.empty(0, 6), 2, "@tp", False)
        assert moved == [(0, 6)] and memory.state.tolist() == [0, 0]

    def test_more_than_a_program_stores(self) -> None:
        memories = group(2)
        own = [words(rank, (64, 3000, torch.bfloat16), 0) for rank in range(2)]
        for memory, x in zip(memories, own, strict=True):
            kernels.launch_push(x, False, memory, take=False)
        found = kernels.launch_push(own[0], False, memories[0], store=False)
        assert torch.equal(found, torch.cat(own, dim=1))

    def test_no_word_is_taken_before_its_mark_has_come(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernels, "POLLS", 1 << 40)  # never look at the clock, which the interpreter has none of
        memory, other = group(2)
        own = [words(rank, (8, 24, torch.bfloat16), 0) for rank in range(2)]
        for x in own:  # launches before, whose words lie in the slots
            earlier = -x
            kernels.launch_push(earlier, False, memory, take=False)
            kernels.launch_push(earlier, False, other, take=False)
            kernels.launch_push(earlier, False, memory, store=False)
            kernels.launch_push(earlier, False, other, store=False)
        kernels.launch_push(own[0], False, memory, take=False)
        kernels.launch_push(own[1], False, other, take=False)
        slot = memory.keep_alive[0].view(PARITIES, 2, SLOT)[1, 1]  # of the third launch, from the other
        came = slot[: 8 * 12].clone()
        slot[7 : 8 * 12] = came[7:] ^ (1 << 33)  # only some are there; the others have another launch's mark
        found: list[Tensor] = []
        taking = threading.Thread(target=lambda: found.append(kernels.launch_push(own[0], False, memory, store=False)))
        taking.start()
        taking.join(0.3)
        assert taking.is_alive() and not found
        slot[7 : 8 * 12] = came[7:]
        taking.join(60)
        assert torch.equal(found[0], torch.cat(own, dim=1))
