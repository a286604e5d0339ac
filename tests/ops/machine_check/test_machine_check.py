"""The check of the machine: what it finds on this CPU, that it finds what is planted, and what it keeps on disk."""

import importlib
import json
import os
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from c_library import using

from lockstep.cache import fingerprint, user_folder
from lockstep.ops.attention import reference as attention_reference
from lockstep.ops.linear import choice as linear_choice
from lockstep.ops.linear.choice import Kind
from lockstep.ops.linear.operator import linear_fp32
from lockstep.ops.machine_check import attention as machine_check_attention
from lockstep.ops.machine_check import check as machine_check
from lockstep.ops.machine_check.check import HeadShape, LatentHeadShape, Product

CPU = torch.device("cpu")
KINDS: dict[tuple[int, int], Kind] = {
    (64, 24): "norm_linear",
    (24, 32): "linear_add",
    (80, 24): "norm_gate_up",
    (24, 40): "linear_add",
}
PRODUCTS = [
    *(Product(kind, m, *shape) for m in (1, 4) for shape, kind in KINDS.items()),
    *(Product("linear", 70, *shape) for shape in KINDS),
    *(Product("linear_fp32", m, 100, 24) for m in (1, 2, 1024)),
]
HEADS = [HeadShape(4, 2, 8)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("lockstep.cache.loaded_code.find_difference", lambda: None)  # of what tests here replace
    return tmp_path / "cache" / "lockstep"


@pytest.fixture(autouse=True)
def no_overrides() -> Iterator[None]:
    before = set(linear_choice.requested)
    yield
    linear_choice.overrides.clear()
    linear_choice.requested &= before


def check(folder: Path, dtype: torch.dtype = torch.float32) -> machine_check.MachineReport:
    return machine_check.check(PRODUCTS, HEADS, CPU, dtype, folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_this_machine_holds(folder, dtype):
    verdict = check(folder, dtype)
    assert verdict.holds and verdict.checked == len(PRODUCTS) + 1 and not verdict.replaced
    assert str(verdict) == f"{len(PRODUCTS) + 1} shapes keep the contract"


@pytest.mark.parametrize("differs_at", [None, 0, 2])
def test_a_gpus_chain_is_there_for_a_part_of_the_rows_at_a_time(monkeypatch, differs_at):
    """With the words of all of them."""
    parts: list[weakref.ref] = []

    def chain(x, weight, kind):
        out = linear_fp32(x, weight)
        if len(x) > 1:
            assert not any(part() is not None for part in parts), "one part's beside another's"
            parts.append(weakref.ref(out))
        return out

    def differing(x, weight):
        out = linear_fp32(x, weight)
        if differs_at is not None:
            out[4 * differs_at] = 7.0
        return out

    monkeypatch.setattr(importlib.import_module("lockstep.ops.linear.triton"), "chain", chain)
    monkeypatch.setattr(machine_check, "linear_fp32", differing)
    monkeypatch.setattr(machine_check, "CHAIN_ROWS", 4)
    found = machine_check._check_cuda_product(Product("linear_fp32", 11, 24, 40), CPU)
    assert found == ("kept" if differs_at is None else "replaced") and len(parts) == 3


def test_the_random_state_is_left_alone(folder):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    check(folder)
    assert torch.equal(torch.rand(4), expected)


def test_rows_that_change_with_the_batch_are_found(folder, monkeypatch):
    """torch's own product, the negative control: some number of rows has other bits than many."""

    def by_batch(x, weight):
        return torch.nn.functional.linear(x, weight) * (1 + 2**-20 * (len(x) == 3))

    monkeypatch.setattr(machine_check, "linear", by_batch)
    verdict = check(folder)
    assert not verdict.holds and len(verdict.broken) == sum(p.kind != "linear_fp32" for p in PRODUCTS)
    assert "--parity warn" in str(verdict) and verdict.broken[0] in str(verdict) and "more" in str(verdict)


def test_attention_that_depends_on_the_batch_is_found(folder, monkeypatch):
    paged = machine_check_attention.attention_paged

    def decode_differs(q, cache, by, *others):
        out = paged(q, cache, by, *others)
        return torch.nextafter(out, out + 1) if by.max_query_len == 1 else out

    monkeypatch.setattr(machine_check_attention, "attention_paged", decode_differs)
    assert check(folder).broken == ("attention 4/2x8",)


ODD_HEADS = (
    HeadShape(5, 5, 6),
    HeadShape(6, 2, 10, True),
    LatentHeadShape(3, 5, 6),
    LatentHeadShape(2, 9, 2),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_odd_attention_holds(folder, dtype):
    assert machine_check.check([], ODD_HEADS, CPU, dtype, folder).broken == ()


class BySize:
    """torch's product, but with few rows even and odd elements are summed apart, as two accumulators would."""

    def __init__(self, product, rows: int) -> None:
        self.product, self.rows = product, rows

    def __call__(self, a, b):
        if a.shape[-2] >= self.rows:
            return self.product(a, b)
        return sum(self.product(a[..., i::2].contiguous(), b[..., i::2, :].contiguous()) for i in (0, 1))


@pytest.mark.parametrize("heads", ODD_HEADS, ids=str)
@pytest.mark.parametrize("broken", ["scores", "values"])
def test_float32_sums_in_another_order_are_found_behind_a_rounding_to_bfloat16(folder, monkeypatch, heads, broken):
    """The negative control of the probe: in the reference attention only the order of float32 additions changes."""
    torch_bmm, other = torch.bmm, BySize(torch.bmm, 32)

    def bmm(a, b):
        scores = b.shape[-1] % attention_reference.KEY_TILE == 0
        return (other if scores == (broken == "scores") else torch_bmm)(a, b)

    monkeypatch.setattr(attention_reference.torch, "bmm", bmm)
    assert machine_check.check([], [heads], CPU, torch.bfloat16, folder).broken == (str(heads),)


@pytest.mark.parametrize("shape", [(6, 70), (3, 70), (64, 30)])
def test_products_in_another_order_are_found_behind_a_rounding_to_bfloat16(folder, monkeypatch, shape):
    other = BySize(torch.matmul, 8)
    monkeypatch.setattr(machine_check, "linear", lambda x, w: other(x.double(), w.double().t()).float().to(x.dtype))
    assert machine_check.check([Product("linear", 1, *shape)], [], CPU, torch.bfloat16, folder).holds, (
        "exact enough in float64"
    )
    monkeypatch.setattr(machine_check, "linear", lambda x, w: other(x.float(), w.float().t()).to(x.dtype))
    product = Product("linear", 2, *shape)
    assert machine_check.check([product], [], CPU, torch.bfloat16, folder).broken == (str(product),)


def test_a_cpu_without_c_operators_is_told_of_them(folder, monkeypatch):
    monkeypatch.setattr(machine_check, "_check_shape", lambda *_: "broken")
    with using(None):
        assert "or the C operators, which are built" in str(check(folder))
    assert "float32 and the C operators" in str(check(folder, torch.bfloat16))
    with using(SimpleNamespace(_name=__file__)):
        assert str(check(folder)).endswith("or another torch version")
    assert machine_check._remedy(torch.device("cuda"), torch.bfloat16) == "another torch, Triton or driver version"


@pytest.mark.parametrize("biased", [False, True])
def test_a_replaced_product_is_computed_by_the_chain(folder, biased):
    p = Product("linear", 300, 64, 24, biased)
    file = folder / f"{machine_check.fingerprint(CPU, torch.float32)}.json"
    user_folder.write(file, {str(p): "replaced", "another": "replaced"})
    assert linear_choice.choose("linear", 300, 64, 24) != linear_choice.CHAIN
    machine_check.restore_overrides(CPU, torch.float32, folder)
    assert linear_choice.choose("linear", 300, 64, 24) == linear_choice.CHAIN
    linear_choice.overrides.clear()
    verdict = machine_check.check([p], [], CPU, torch.float32, folder)
    assert verdict.holds and verdict.replaced == (str(p),) and "Triton replaces the library for linear" in str(verdict)
    assert linear_choice.choose("linear", 300, 64, 24) == linear_choice.CHAIN
    assert linear_choice.choose("linear", 300, 64, 32) != linear_choice.CHAIN
    linear_choice.choose("linear", 300, 64, 24, biased)
    assert {p, Product("linear", 300, 64, 32)} <= set(machine_check.computed_products())


def test_a_verdict_is_kept_for_these_versions_threads_and_this_dtype(folder, monkeypatch):
    first = check(folder)
    monkeypatch.setattr(machine_check, "_check_shape", lambda *_: pytest.fail("checked again"))
    assert check(folder) == first
    with monkeypatch.context() as patch, pytest.raises(pytest.fail.Exception):
        patch.setattr(torch, "get_num_threads", lambda: 9)
        check(folder)
    with pytest.raises(pytest.fail.Exception):
        check(folder, torch.bfloat16)
    monkeypatch.setattr(torch, "__version__", "3.0")
    with pytest.raises(pytest.fail.Exception):
        check(folder)


def test_of_many_versions_the_latest_verdicts_are_kept(folder, monkeypatch):
    for version in range(machine_check.KEPT_OUTCOMES + 2):
        monkeypatch.setattr(torch, "__version__", f"3.{version}")
        machine_check.check(PRODUCTS[:1], [], CPU, torch.float32, folder)
    assert len(list(folder.iterdir())) <= machine_check.KEPT_OUTCOMES
    monkeypatch.setattr(machine_check, "_check_shape", lambda *_: pytest.fail("checked again"))
    machine_check.check(PRODUCTS[:1], [], CPU, torch.float32, folder)


def planted(monkeypatch, edited: Path) -> None:
    """From here on this file of the package has a byte more, and the package is read anew."""
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read_bytes(path) + b"\n" * (path == edited))
    monkeypatch.setattr(fingerprint, "sources", fingerprint.sources.__wrapped__)


@pytest.mark.parametrize(
    "name",
    [
        *("native/attention.c", "native/vector.h", "attention/triton.py", "attention/triton_decode.py"),
        *("attention/operator.py", "mla/triton.py", "machine_check/shapes.py", "linear/triton.py"),
    ],
)
def test_a_verdict_is_kept_for_these_sources(folder, monkeypatch, name):
    """Whichever file computes attention or a product: what an earlier version of it was found to keep says nothing."""
    products, edited = PRODUCTS[:1], Path(machine_check.__file__).parents[1] / name
    assert edited.is_file()
    machine_check.check(products, [], CPU, torch.float32, folder)
    monkeypatch.setattr(machine_check, "_check_shape", lambda *_: pytest.fail("checked again"))
    machine_check.check(products, [], CPU, torch.float32, folder)
    planted(monkeypatch, edited)
    with pytest.raises(pytest.fail.Exception):
        machine_check.check(products, [], CPU, torch.float32, folder)


def test_the_folder_is_the_user_s_alone(folder):
    check(folder)
    (file,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert set(json.loads(file.read_text())) == {*map(str, PRODUCTS), *map(str, HEADS)}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"linear 1x2x3": "fine"}', "\xff"])
def test_a_corrupt_file_is_ignored(folder, text):
    first = check(folder)
    (file,) = folder.iterdir()
    file.write_bytes(text.encode("latin-1"))
    assert check(folder) == first
    assert set(json.loads(file.read_text())) == {*map(str, PRODUCTS), *map(str, HEADS)}


@pytest.mark.parametrize("writable", ["folder", "file"])
def test_what_others_can_write_is_ignored(folder, writable):
    file = folder / "a.json"
    user_folder.write(file, 1)
    assert user_folder.read(file) == 1
    os.chmod(folder if writable == "folder" else file, 0o777)
    assert user_folder.read(file) is None


def test_an_unwritable_folder_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    user_folder.write(tmp_path / "file" / "lockstep" / "a.json", 1, keep=2)
    assert user_folder.read(tmp_path / "file" / "lockstep" / "a.json") is None


def test_a_rehearsal_checks_what_is_due_and_keeps_nothing(folder, monkeypatch):
    seen: list[str] = []
    monkeypatch.setattr(machine_check, "_check_shape", lambda shape, *_: seen.append(str(shape)) or "broken")
    machine_check.rehearse(PRODUCTS, HEADS, CPU, torch.float32, folder)
    assert seen == [*map(str, PRODUCTS), *map(str, HEADS)] and not folder.exists() and not linear_choice.overrides
    monkeypatch.undo()
    check(folder)
    monkeypatch.setattr(machine_check, "_check_shape", lambda *_: pytest.fail("checked again"))
    machine_check.rehearse(PRODUCTS, HEADS, CPU, torch.float32, folder)


def test_where_the_folder_is(monkeypatch, tmp_path):
    monkeypatch.delenv("LOCKSTEP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_folder.cache_folder() == tmp_path / "lockstep"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the specification says to ignore
    assert user_folder.cache_folder() == Path.home() / ".cache" / "lockstep"


def test_the_oldest_files_go(tmp_path):
    for i in range(4):
        path = tmp_path / "own" / f"{i}.json"
        assert user_folder.write(path, i, keep=2)
        os.utime(path, (i, i))
    assert [p.name for p in user_folder.newest(tmp_path / "own")] == ["3.json", "2.json"]
    assert user_folder.newest(tmp_path / "absent") == []
