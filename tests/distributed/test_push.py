"""Words pushed into other ranks' memory: the kernel under Triton's interpreter, its ranks one after another."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from processes import finished, run_interpreted
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime.errors import InterpreterError

    from lockstep.distributed.push import triton as kernels
    from lockstep.distributed.push import triton_norm, triton_products
    from lockstep.distributed.push.memory import SharedMemory
    from lockstep.ops.attention import triton_decode as attention
    from lockstep.ops.linear import triton as products
    from lockstep.ops.linear.choice import Choice
    from lockstep.ops.norm import triton as norms
    from lockstep.ops.records import PARITIES, SLOT, Contexts, Epilogue, KVPages, Norm, Rotation
    from lockstep.ops.rows import aligned_rows

SHAPES = [
    (1, 8, torch.bfloat16),
    (8, 5, torch.bfloat16),
    (64, 96, torch.float32),
    (3, 3, torch.int32),
    (2, 7, torch.int64),
]


def test_kernel_under_the_interpreter() -> None:
    run_interpreted(__file__)


COMPILE = """
import sys, torch
from compile_check import Kernels, SharedMemory
from lockstep.distributed.push.triton_norm import take_norm
from lockstep.ops.norm.triton import rms_norm
from lockstep.ops.records import Norm

class Said(Kernels):
    def _add(self, kernel):
        print(f"KERNEL {kernel.name} {self.arch}", kernel.asm["ptx"], sep="\\n")

kernels = Said()
with kernels.collected():
    ints = [torch.empty(n, dtype=torch.int64) for n in (9, 2, 1)]
    for kernels.arch in (256, 4096, 5120):
        x, weight = (torch.empty(*shape, kernels.arch, dtype=torch.bfloat16) for shape in ((8,), ()))
        rms_norm(x, weight, 1e-6)
        take_norm(x, Norm(weight, 1e-6), SharedMemory(1, 4, 10**9, *ints))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_norm_of_taken_words_adds_as_the_norm_of_rows() -> None:
    """In the instructions for an H200: the same ones compute on floats, in the same order. What was stored for other
    threads to load lies behind a barrier."""
    import triton

    if not (Path(triton.__file__).parent / "backends/nvidia/bin/ptxas").exists():
        pytest.skip("this Triton cannot compile for NVIDIA GPUs")
    benchmarks = str(Path(__file__).parents[2] / "benchmarks")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join((benchmarks, *sys.path))}
    done = finished([sys.executable, "-c", COMPILE], env=environment)
    assert done.returncode == 0, done.stderr
    computed, widths = dict[tuple[str, str], list[str]](), set[str]()
    for code in done.stdout.split("KERNEL ")[1:]:
        (name, width), lines = code.partition("\n")[0].split(), code.splitlines()
        first = next(i for i, line in enumerate(lines) if "mul.rn.f32" in line)
        floats = re.findall(r"\b(?:add|mul|fma|div|rsqrt|sqrt)\S*f32\b|shfl\S+bfly\S+", "\n".join(lines[first:]))
        computed[name, width], widths = floats, widths | {width}
        if name == "_take_norm_kernel":
            stored, loaded = (
                [i for i, line in enumerate(lines[: first + 1]) if pattern in line]
                for pattern in ("st.global", "ld.global.v4")
            )
            assert any("bar.sync" in line for line in lines[stored[-1] : loaded[-1]])
    assert len(computed) == 6 and all(len(floats) > 30 for floats in computed.values())
    for width in widths:
        assert computed["_rms_norm_kernel", width] == computed["_take_norm_kernel", width]


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


def end(_: object, late: Any) -> None:
    """Instead of a report to the host and a trap."""
    raise TimeoutError(f"late: {late.handle.data.item()}")


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

    @pytest.mark.parametrize("ranks", [2, 4])
    def test_a_norm_takes_the_words_of_its_rows(self, ranks: int) -> None:
        memories = group(ranks)
        for seed, (rows, columns) in enumerate(((1, 16), (5, 48), (3, 32))):  # the row is a block, and is not
            own = [words(rank, (rows, columns, torch.bfloat16), seed) for rank in range(ranks)]
            whole = torch.cat(own, dim=1)
            norm = Norm(words(0, (1, ranks * columns, torch.bfloat16), 9)[0], 1e-6, 1.0 * (seed == 1))
            for memory, x in zip(memories, own, strict=True):
                kernels.launch_push(x, False, memory, take=False)
            for memory in memories:
                found = triton_norm.take_norm(torch.empty_like(whole), norm, memory)
                assert torch.equal(found, norms.rms_norm(whole, *norm))
        assert [memory.state.tolist() for memory in memories] == [[3, 0]] * ranks

    def test_no_kernel_is_between_a_product_and_what_takes_its_words(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Which loads the norm's weights at once, and so not those that the kernel before it copied."""
        (memory, _), launched = group(2), list[str]()
        monkeypatch.setattr(triton_products, "_stores", lambda *_: True)
        monkeypatch.setattr(triton_products, "shared_memory", lambda _: memory)
        monkeypatch.setattr(triton_products.kernels, "product", lambda *_: launched.append("product"))

        def copied(x: Tensor) -> Tensor:
            launched.append("copy")
            return aligned_rows(x)

        for module in (triton_products, triton_norm):
            monkeypatch.setattr(module, "aligned_rows", copied, raising=False)
        monkeypatch.setattr(triton_norm, "_take_norm_kernel", {(3,): lambda *_, **__: launched.append("take")})
        x, residual = words(0, (3, 64, torch.bfloat16), 0), words(0, (3, 32, torch.bfloat16), 1)
        norm = Norm(words(0, (1, 128, torch.bfloat16), 9)[0, ::2], 1e-6)
        triton_products.push_linear_add_norm(x, words(0, (32, 64, torch.bfloat16), 2), residual, 2, "@tp", norm)
        assert launched == ["copy", "product", "take"]

    def test_a_thread_waits_for_words_of_its_own(self) -> None:
        has_words = triton_norm.has_words_of_norm
        assert not has_words(16, 2) and has_words(16, 4) and has_words(32, 2) and not has_words(24, 4)

    def test_a_norm_tells_whose_words_are_late(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock, memories = itertools.count(1), group(4)
        monkeypatch.setattr(triton_norm, "POLLS", 1)
        monkeypatch.setattr(kernels, "_now", lambda _: next(clock))
        monkeypatch.setattr(kernels, "_end_all_work", end)
        for memory in memories[:2] + memories[3:]:
            kernels.launch_push(words(0, (2, 16, torch.bfloat16), 0), False, memory, take=False)
        norm = Norm(words(0, (1, 64, torch.bfloat16), 9)[0], 1e-6)
        with pytest.raises(InterpreterError, match=f"late: {1 * 4 + 2}"):  # the first launch, of the third rank
            triton_norm.take_norm(torch.empty(2, 64, dtype=torch.bfloat16), norm, memories[0])

    def test_words_that_come_with_the_last_poll_are_not_late(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nor is a rank told that nobody's are."""
        clock, memories = itertools.count(1), group(2)
        own = [words(rank, (2, 32, torch.bfloat16), 0) for rank in range(2)]
        arrive = [lambda: kernels.launch_push(own[1], False, memories[1], take=False)]

        def now(_: object) -> int:
            if arrive:
                arrive.pop()()
            return next(clock)

        monkeypatch.setattr(triton_norm, "POLLS", 1)
        monkeypatch.setattr(kernels, "_now", now)
        monkeypatch.setattr(kernels, "_end_all_work", end)
        kernels.launch_push(own[0], False, memories[0], take=False)
        norm, whole = Norm(words(0, (1, 64, torch.bfloat16), 9)[0], 1e-6), torch.cat(own, dim=1)
        found = triton_norm.take_norm(torch.empty_like(whole), norm, memories[0])
        assert torch.equal(found, norms.rms_norm(whole, *norm))

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
