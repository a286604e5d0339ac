"""A rank reads what it will hold of a model, and has no more memory than that and one tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_edits import store_in_4_bits
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.cache import tensor_file
from lockstep.distributed.mesh import Axis, Mesh
from lockstep.errors import InputError
from lockstep.models import Decoder, FolderWeights, ResidentWeights, load_part, save_model
from lockstep.models.blocks import mxfp4
from lockstep.models.checks import require_divisible
from lockstep.models.init import ARCHITECTURES, RandomWeights, initialize
from lockstep.models.parts import TensorRange, tensors_of

TINY = [name for name in ARCHITECTURES if name.startswith("tiny")]


class Peak(TorchDispatchMode):
    """Bytes of the host's memory that tensors made within have together at most."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, more = func(*args, **(kwargs or {})), False
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                known = self._live.get(storage._cdata)
                if known is None or known[0].expired():
                    self._live[storage._cdata], more = (StorageWeakRef(storage), storage.nbytes()), True
        if more:  # else there is less than before
            self._live = {key: one for key, one in self._live.items() if not one[0].expired()}
            self.bytes = max(self.bytes, sum(size for _, size in self._live.values()))
        return made


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes of each read of a file's tensors."""
    sizes, read = list[int](), tensor_file._read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_file, "_read", lambda *given: (sizes.append(given[2].nbytes), read(*given)))
        yield sizes


def share_of(model: Decoder) -> int:
    tensors = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sum(tensors.values()) + sum(buffer.nbytes for buffer in model.buffers())


@pytest.mark.parametrize("name", TINY)
def test_a_rank_reads_its_part_and_no_more(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every family: heads and fused projections, experts, tied heads, files in several shards."""
    config = ARCHITECTURES[name]
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", 20_000)
    whole = initialize(Decoder(config, torch.float32), 3)
    with torch.no_grad():
        for vector in [p for p in whole.parameters() if p.dim() == 1]:
            vector.add_(torch.arange(len(vector)))
    save_model(whole, tmp_path, 10**6)
    require_divisible(config, 2, "tp")
    largest = max(p.nbytes for p in whole.parameters())
    drawn = initialize(Decoder(config, torch.bfloat16), 3)
    for rank in range(2):
        mesh = Mesh(tp=Axis("tp", 2, rank))
        expected = load_part(ResidentWeights(whole), torch.float32, "cpu", mesh)
        with counted() as sizes, Peak() as peak:
            part = load_part(FolderWeights(tmp_path), torch.float32, "cpu", mesh)
        share = share_of(part)
        assert share < 0.75 * share_of(whole)
        assert all(map(torch.equal, part.parameters(), expected.parameters()))
        assert all(map(torch.equal, part.buffers(), expected.buffers()))
        assert share <= sum(sizes) <= 1.02 * share  # a block of rows may lie on two ranks
        assert peak.bytes <= 1.2 * share + largest
        with Peak() as peak:
            part = load_part(RandomWeights(config, 3), torch.bfloat16, "cpu", mesh)
        assert peak.bytes <= 1.2 * share_of(part) + largest
        expected = load_part(ResidentWeights(drawn), torch.bfloat16, "cpu", mesh)
        assert all(map(torch.equal, part.parameters(), expected.parameters()))


def test_fused_projections_of_heads_that_are_partly_rotated_are_divided(tmp_path: Path) -> None:
    """Their queries' and keys' rows lie in another order in the folder, and their values' do not."""
    whole = initialize(Decoder(replace(ARCHITECTURES["tiny-phi3"], rotary_dim=16), torch.float32), 3)
    save_model(whole, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")["model.layers.0.self_attn.qkv_proj.weight"]
    qkv, values = whole.layers[0].get_parameter("qkv"), 2 * 32
    assert not torch.equal(stored, qkv) and torch.equal(stored[-values:], qkv[-values:])
    for rank in range(2):
        mesh = Mesh(tp=Axis("tp", 2, rank))
        part, expected = (
            load_part(x, torch.float32, "cpu", mesh) for x in (FolderWeights(tmp_path), ResidentWeights(whole))
        )
        assert all(map(torch.equal, part.parameters(), expected.parameters()))


def test_a_scale_is_any_power_of_two_or_no_number() -> None:
    blocks, scales = torch.full((1, 256, 1, 16), 0x22, dtype=torch.uint8), torch.arange(256, dtype=torch.uint8)
    ones = mxfp4.dequantize(blocks, scales.view(1, 256, 1))[0].double()
    assert torch.equal(ones[:, :255], 2.0 ** torch.arange(-127, 128).double().expand(32, -1))
    assert ones[:, 255].isnan().all()


def test_a_rank_reads_its_part_of_weights_of_4_bits(tmp_path: Path) -> None:
    """Heads and experts of two ranks; then shards that begin and end anywhere, which read an output of the other kind
    beside each that they have."""
    config = ARCHITECTURES["tiny-gpt-oss"]
    save_model(initialize(Decoder(config, torch.float32), 3), tmp_path)
    packed = store_in_4_bits(tmp_path)
    whole = load_part(FolderWeights(tmp_path), torch.float32, "cpu")
    for rank in range(2):
        mesh = Mesh(tp=Axis("tp", 2, rank))
        with counted() as sizes:
            part = load_part(FolderWeights(tmp_path), torch.float32, "cpu", mesh)
        expected = load_part(ResidentWeights(whole), torch.float32, "cpu", mesh)
        assert all(map(torch.equal, part.parameters(), expected.parameters()))
        experts = sum(
            p.nbytes for name, p in part.named_parameters() if name.endswith(("experts.gate_up", "experts.down"))
        )
        assert sum(sizes) == share_of(part) - experts + packed // 2
    name = "layers.1.moe.experts.gate_up"
    flat = tensors_of(whole)[name].flatten()
    for first, count in ((0, 1), (12_345, 67), (70_001, 30_000), (flat.numel() - 9, 9)):
        held = TensorRange(torch.empty(count), first)
        with counted() as sizes:
            FolderWeights(tmp_path).fill({name: [held]})
        assert torch.equal(held.values, flat[first : first + count])
        rows = count // config.hidden_size + 2
        assert sum(sizes) <= 2 * rows * config.hidden_size // 32 * 17


def test_a_file_that_ends_or_is_damaged_where_a_rank_reads(tmp_path: Path) -> None:
    """What a rank does not read it cannot find; what it does it names."""
    whole = initialize(Decoder(ARCHITECTURES["tiny"], torch.float32), 3)
    save_model(whole, tmp_path)
    file, source = tmp_path / "model.safetensors", FolderWeights(tmp_path)
    first, second = ([TensorRange(torch.empty(512), at)] for at in (0, 512))
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"].view(-1)[600] = torch.nan
    save_file(tensors, file)
    source.fill({"embed": first})
    assert torch.equal(first[0].values, whole.embed.flatten()[:512])
    with pytest.raises(InputError, match=r"model\.safetensors: model\.embed_tokens\.weight has values that are NaN"):
        source.fill({"embed": second})
    read = tensor_file._read

    def shorter(*given: Any) -> None:
        file.write_bytes(file.read_bytes()[:5000])
        read(*given)

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(InputError, match=r"cannot be read \(it ends within model"),
    ):
        patch.setattr(tensor_file, "_read", shorter)
        source.fill({"norm": [TensorRange(torch.empty(8), 0)]})
    with pytest.raises(InputError, match=r"model\.safetensors: not a whole safetensors file"):
        source.fill({"embed": first})
