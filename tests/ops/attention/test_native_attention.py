"""Attention in C: bitwise invariant to batch, neighbours, pages, chunks, shared prefixes and threads.

Builds of the sources with a wrong plan show that the comparisons notice one; a build for narrower vectors shows that
the bits are not the machine's.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest
import torch
from c_library import using
from native_cases import same, sampling, wide
from processes import finished
from torch import Tensor

from lockstep import ops
from lockstep.ops import native
from lockstep.ops.attention import reference as attention_reference
from lockstep.ops.native import library
from lockstep.ops.records import ACTIVATIONS

pytestmark = pytest.mark.skipif(library.built is None, reason="the C library is not built")

ROOT = Path(native.__file__).parents[3]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


class Sequence:
    """One sequence's queries, keys and values, and its attention however it is laid out."""

    def __init__(self, length: int, heads: int, kv_heads: int, head_dim: int) -> None:
        self.length = length
        self.q, self.k, self.v = (
            wide(length, heads, head_dim),
            wide(length, kv_heads, head_dim),
            wide(length, kv_heads, head_dim),
        )

    def packed(self) -> Tensor:
        """The whole as one segment."""
        return packed(self.q, self.k, self.v, [0, self.length], [0], [0])

    def after_prefix(self, prefix: int, gap: int = 5) -> Tensor:
        """A shared prefix, a segment of NaN after it, and the rest after it too; the rows of the rest."""
        q, k, v = (
            torch.cat((x[:prefix], torch.full_like(x[:gap], torch.nan), x[prefix:])) for x in (self.q, self.k, self.v)
        )
        starts = [0, prefix, prefix + gap, self.length + gap]
        return packed(q, k, v, starts, [0, 0, 0], [0, prefix, prefix])[prefix + gap :]

    def paged(self, page_size: int, cuts: list[int]) -> Tensor:
        """In chunks that end at `cuts`, over shuffled pages of a cache that is NaN wherever nothing was stored."""
        pages = -(-self.length // page_size)
        caches = [torch.full((pages + 3, page_size, *self.k.shape[1:]), torch.nan) for _ in range(2)]
        table = torch.randperm(pages + 3)[:pages].int().unsqueeze(0)
        position = torch.arange(self.length)
        slots = table[0, position // page_size].long() * page_size + position % page_size
        outputs = []
        for start, end in zip([0, *cuts], [*cuts, self.length], strict=True):
            new = slice(start, end)
            ops.write_kv(self.k[new], self.v[new], ops.KVPages(*caches), slots[new])
            lengths = torch.tensor([0, end - start], dtype=torch.int32)
            context = torch.tensor([end], dtype=torch.int32)
            outputs.append(
                ops.attention_paged(
                    self.q[new], ops.KVPages(*caches), ops.Paged(table, lengths, context, end - start, end)
                )
            )
        return torch.cat(outputs)

    def decoded(self, positions: list[int], page_size: int = 16) -> Tensor:
        """Queries at `positions` as a batch, one token each; keys after a query are there, but not its to see."""
        pages = -(-self.length // page_size)
        shape = (pages * page_size - self.length, *self.k.shape[1:])
        caches = [
            torch.cat((x, torch.full(shape, torch.nan))).unflatten(0, (pages, page_size)) for x in (self.k, self.v)
        ]
        table = torch.arange(pages, dtype=torch.int32).expand(len(positions), -1)
        starts = torch.arange(len(positions) + 1, dtype=torch.int32)
        context = torch.tensor(positions, dtype=torch.int32) + 1
        return ops.attention_paged(
            self.q[positions], ops.KVPages(*caches), ops.Paged(table, starts, context, 1, self.length)
        )


def packed(
    q: Tensor, k: Tensor, v: Tensor, starts: list[int], prefix_start: list[int], prefix_len: list[int]
) -> Tensor:
    """`ops.attention_packed` of Python lists."""
    tensors = [torch.tensor(x, dtype=torch.int32) for x in (starts, prefix_start, prefix_len)]
    return ops.attention_packed(q, k, v, ops.Packed(*tensors, q.shape[0]))


@pytest.mark.parametrize("prefix", [62, 63, 64, 126, 127, 128])
def test_samples_share_no_key_but_the_prompt_s(prefix: int) -> None:
    """A prompt of 63 tokens leaves one key of its tile to each sample: the tile is not the samples' to share."""
    shared, samples = Sequence(prefix, 4, 2, 32), [Sequence(9, 4, 2, 32) for _ in range(3)]
    expected = [attended_after(shared, sample) for sample in samples]
    q, k, v = (torch.cat([getattr(x, name) for x in (shared, *samples)]) for name in "qkv")
    starts = [0, *(prefix + 9 * i for i in range(4))]
    out = packed(q, k, v, starts, [0] * 4, [0] + [prefix] * 3)[prefix:]
    assert all(map(same, out.split(9), expected))

    full, page_size = prefix // 16, 16
    pages = -(-(prefix + 9) // page_size) - full  # of a sample: a copy of the prompt's last page, and what follows
    table = [list(range(full)) + [full + i * pages + j for j in range(pages)] for i in range(3)]
    caches = [torch.full((full + 3 * pages, page_size, 2, 32), torch.nan) for _ in range(2)]
    for sample, row in zip(samples, table, strict=True):
        for cache, name in zip(caches, "kv", strict=True):
            position = torch.arange(prefix + 9)
            slot = torch.tensor(row)[position // page_size] * page_size + position % page_size
            cache.flatten(0, 1)[slot] = torch.cat((getattr(shared, name), getattr(sample, name)))
    lengths, context = torch.tensor([0, 9, 18, 27], dtype=torch.int32), torch.full((3,), prefix + 9, dtype=torch.int32)
    pages_of = torch.tensor(table, dtype=torch.int32)
    out = ops.attention_paged(q[prefix:], ops.KVPages(*caches), ops.Paged(pages_of, lengths, context, 9, prefix + 9))
    assert all(map(same, out.split(9), expected))


def attended_after(shared: Sequence, sample: Sequence) -> Tensor:
    """Outputs of a sample behind a prompt, as one segment."""
    q, k, v = (torch.cat((getattr(shared, name), getattr(sample, name))) for name in "qkv")
    return packed(q, k, v, [0, len(q)], [0], [0])[shared.length :]


def invariant(sequence: Sequence) -> bool:
    """Whether every layout gives the bits of the whole sequence as one packed segment."""
    length, expected = sequence.length, sequence.packed()
    edges = [p for p in (0, 1, 15, 16, 31, 63, 64, 65, 127, 128, length - 1) if p < length]
    results = [
        (sequence.decoded(edges), expected[edges]),
        (sequence.decoded(edges[::-1], page_size=7), expected[edges[::-1]]),
        (sequence.paged(16, []), expected),
        (sequence.paged(1, list(range(9, length, 9))), expected),
        (sequence.paged(7, [length // 2]), expected),
        (sequence.paged(100, list(range(1, length, 64))), expected),
    ]
    results += [(sequence.after_prefix(p), expected[p:]) for p in (1, length // 3, length - 1)]
    return all(same(*pair) for pair in results)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1), (5, 1), (2, 2), (40, 1)])
@pytest.mark.parametrize("head_dim", [16, 24, 80, 128])
def test_no_layout_changes_a_bit_of_attention(heads: int, kv_heads: int, head_dim: int) -> None:
    assert invariant(Sequence(150, heads, kv_heads, head_dim))


def test_what_a_query_does_not_see_may_be_nan() -> None:
    sequence = Sequence(40, 4, 2, 16)
    expected = sequence.packed()
    sequence.k[21:] = sequence.v[21:] = torch.nan
    assert same(sequence.packed()[:21], expected[:21])


def siblings_keep_their_bits(page_size: int) -> bool:
    """Whether samples of a prompt, decoded beside each other and beside a stranger, get what each gets alone."""
    prompt, lengths = 130, [131, 150, 70, 200, 195]
    sequences = [Sequence(n, 4, 2, 32) for n in lengths]
    for sequence in (sequences[1], sequences[3], sequences[4]):
        sequence.k[:prompt], sequence.v[:prompt] = sequences[0].k[:prompt], sequences[0].v[:prompt]
    shared, count = prompt // page_size, -(-max(lengths) // page_size)
    table = torch.arange(len(lengths) * count, dtype=torch.int32).view(len(lengths), count)
    table[[1, 3, 4], :shared] = table[0, :shared]
    caches = [torch.full((len(lengths) * count, page_size, 2, 32), torch.nan) for _ in range(2)]
    for sequence, pages in zip(sequences, table, strict=True):
        position = torch.arange(sequence.length)
        slots = pages[position // page_size].long() * page_size + position % page_size
        ops.write_kv(sequence.k, sequence.v, ops.KVPages(*caches), slots)
    q = torch.stack([sequence.q[-1] for sequence in sequences])
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32)
    out = ops.attention_paged(
        q, ops.KVPages(*caches), ops.Paged(table, starts, torch.tensor(lengths, dtype=torch.int32), 1, max(lengths))
    )
    return all(same(row, sequence.packed()[-1]) for row, sequence in zip(out, sequences, strict=True))


@pytest.mark.parametrize("page_size", [1, 16, 64, 65])
def test_samples_of_a_prompt_share_its_pages(page_size: int) -> None:
    assert siblings_keep_their_bits(page_size)


def test_long_contexts_decode_to_the_bits_of_training() -> None:
    sequence = Sequence(4100, 2, 1, 32)
    positions = [2, 63, 64, 1000, 2047, 2048, 4031, 4032, 4095, 4096, 4099]
    assert same(sequence.decoded(positions), sequence.packed()[positions])


def test_attention_agrees_with_the_reference() -> None:
    for heads, kv_heads, head_dim in ((4, 2, 32), (3, 1, 24), (5, 5, 80)):
        sequence = Sequence(150, heads, kv_heads, head_dim)
        sequence.q, sequence.k = torch.randn_like(sequence.q), torch.randn_like(sequence.k)
        tensors = [torch.tensor(x, dtype=torch.int32) for x in ([0, 150], [0], [0])]
        expected = attention_reference.packed(sequence.q, sequence.k, sequence.v, ops.Packed(*tensors, 0))
        torch.testing.assert_close(sequence.packed(), expected, rtol=1e-5, atol=1e-5)


def test_neighbours_padding_and_threads_do_not_change_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = Sequence(100, 4, 2, 32)
    expected = sequence.packed()
    around = [torch.full_like(x[:33], torch.nan) for x in (sequence.q, sequence.k, sequence.v)]
    q, k, v = (torch.cat((a, x, a)) for a, x in zip(around, (sequence.q, sequence.k, sequence.v), strict=True))
    for threads in (1, 2, 3):
        out = packed(q, k, v, [0, 20, 33, 133, 133], [0, 0, 0, 0], [0, 0, 0, 0])
        assert same(out[33:133], expected)
        assert same(out[133:], torch.zeros(33, 4, 32))
        monkeypatch.setattr(native, "THREAD_WORK", 1)
        torch.set_num_threads(threads + 1)


def test_a_key_that_only_later_rows_see_changes_none_before() -> None:
    sequence = Sequence(100, 4, 2, 32)
    expected = sequence.packed()
    sequence.k[90], sequence.v[90] = torch.nan, torch.nan
    out = sequence.packed()
    assert same(out[:90], expected[:90]) and out[90:].isnan().all()


# ---- indices outside ----


def test_what_lies_outside_is_refused() -> None:
    q, cache = torch.randn(1, 2, 16), torch.zeros(4, 8, 1, 16)
    starts, context = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
    for table in ([[0, 4]], [[-1, 0]], [[0]]):
        with pytest.raises(IndexError, match="outside"):
            ops.attention_paged(
                q, ops.KVPages(cache, cache), ops.Paged(torch.tensor(table, dtype=torch.int32), starts, context, 1, 9)
            )
    for slot in (-1, 32):
        with pytest.raises(IndexError, match="32"):
            ops.write_kv(cache[0, :1], cache[0, :1], ops.KVPages(cache, cache), torch.tensor([slot]))
    with pytest.raises(IndexError, match="outside"):
        packed(q, cache[0, :1], cache[0, :1], [0, 1], [5], [3])
    with pytest.raises(TypeError, match="int32"):
        ops.attention_paged(q, ops.KVPages(cache, cache), ops.Paged(torch.tensor([[0, 1]]), starts, context, 1, 9))


# ---- other builds of the sources ----


def build(folder: Path, *replacements: tuple[str, str, str]) -> Any:
    """The library of a copy of the sources (and of setup.py) with (file, text, new text) replaced in it."""
    target = folder / "lockstep/ops/native"
    shutil.copytree(Path(native.__file__).parent, target, ignore=shutil.ignore_patterns("*.so", "*.py", "__pycache__"))
    shutil.copy(ROOT / "setup.py", folder)
    for name, text, new in replacements:
        path = next(p for p in (target / name, folder / name) if p.exists())
        source = path.read_text()
        assert text in source, f"{name} has no {text!r}"
        path.write_text(source.replace(text, new))
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    finished(command, cwd=folder, check=True)
    found = next(filter(None, (library.load(target / f"_kernels{suffix}") for suffix in EXTENSION_SUFFIXES)), None)
    assert found is not None
    return found


QUICKLY = ("setup.py", "-O3", "-O0")  # the same bits, in a quarter of the compiler's time


@pytest.mark.parametrize(
    "mutant",
    [
        ("attention.c", "(int64_t tile = begin; tile <= last; tile += TILE)",
         "(int64_t n = 0, tile; tile = (a->tokens > 20 ? last / TILE - n : n) * TILE, n <= last / TILE; n++)"),
        ("attention.c", "for (int j = begin; j < common; j++) {",
         "for (int i = begin; i < common; i++) { int j = R < 4 ? begin + common - 1 - i : i;"),
        ("attention.c", "if (i == j) return 1;", "return 1;"),
    ],
    ids=[
        "long batches take tiles in descending order",
        "few rows take the values in descending order",
        "neighbours take the same keys",
    ],
)  # fmt: skip
def test_a_wrong_plan_is_noticed(mutant: tuple[str, str, str], tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    sequence = Sequence(150, 3, 1, 24)
    assert invariant(sequence) and siblings_keep_their_bits(16)
    with using(build(tmp_path, mutant, QUICKLY)):
        assert not (invariant(sequence) and siblings_keep_their_bits(16))


def test_short_splits_change_no_layout_s_bits(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    sequence, short = Sequence(300, 3, 1, 24), ("attention.c", "SPLIT = 4096", "SPLIT = 128")
    one_split = sequence.packed()
    with using(build(tmp_path / "short", short, QUICKLY)):
        assert invariant(sequence) and siblings_keep_their_bits(16)
        assert same(sequence.packed()[:128], one_split[:128]) and not same(sequence.packed(), one_split)
    of_the_batch = (
        "attention.c", ", SPLIT = 4096 };", " };\n#define SPLIT (a->tokens > 20 ? 256 : 128)\n"
    )  # fmt: skip
    with using(build(tmp_path / "batch", of_the_batch, QUICKLY)):
        assert not invariant(sequence), "splits that depend on the batch must be noticed"


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_bits_do_not_depend_on_the_vector_width(lanes: int, tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    sequence, x, weight = Sequence(150, 3, 1, 24), wide(33, 300), torch.randn(150)
    matrix, parameters = wide(100, 300), sampling(33)
    table = native.rope_table(torch.arange(33), torch.rand(12))
    keys, position, off = torch.randint(0, 2**32, (33, 4)), torch.arange(33), torch.full((33,), -torch.inf)

    def run() -> list[Tensor]:
        logits = native.linear(x, matrix)
        return [
            sequence.packed(),
            logits,
            native.rms_norm(x[:, :150], weight, 1e-6),
            *(native.silu_mul(x, activation) for activation in ACTIVATIONS),
            *(native.silu_mul_backward(x[:, :150].contiguous(), x, activation) for activation in ACTIVATIONS),
            native.qk_norm_rope(x, ops.Rotation(*weight[:48].view(2, 24), table, 5, 2, 1e-6)),
            *native.statistics(logits, parameters, None, True, True),
            native.draw(logits, torch.ones(33), off, ops.SampleKeys(keys, position), False).int(),
        ]

    expected = run()
    wide_vectors = ("setup.py", '"-Wno-psabi",', f'"-Wno-psabi", "-DLANES={lanes}",')
    with using(build(tmp_path, wide_vectors, QUICKLY)):
        assert all(map(same, run(), expected))
