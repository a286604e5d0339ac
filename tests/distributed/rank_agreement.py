"""What two ranks agree on: a fault of one stops both, and what one has or makes comes to the other."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rank_setup import DEVICE, DTYPE, FILTERED, OPTIMIZER, batches, check, decoder, on_all, rollout

from lockstep.cache import tensor_file
from lockstep.config import LossConfig
from lockstep.distributed import World
from lockstep.distributed.mesh import ONE_RANK
from lockstep.environments.ranks.rollouts import COLUMNS, RolloutHolders, outline
from lockstep.errors import InputError, LockstepError
from lockstep.models import Decoder, FolderWeights, all_gather_shares, load_part, parts, save_model
from lockstep.trainer import Trainer
from lockstep.types import RolloutGroup, SampleIdentity, Segment, Trajectory


@check
def a_flipped_bit_on_one_rank(world: World) -> Any:
    model = decoder()
    trainer = Trainer(model, OPTIMIZER, LossConfig(), world=world)
    groups = rollout(model, 0)
    before = trainer.flat.data.clone()
    for batch in batches(groups, [world.rank]):
        if world.rank == 1 and batch.sequences:
            batch.old_logprob_C.view(torch.int32)[2] ^= 1
        trainer.forward_backward(batch)
        break
    result = trainer.optim_step(1e-2)
    named = [(m.request, m.position, m.kind) for m in result.mismatches]
    kept = torch.equal(trainer.flat.data, before) and not trainer.flat.grad.any()
    bit = 0 < result.logprob_diff_max < 1e-5
    return on_all(world, [result.applied, result.tokens_different, bit, named, kept])


@check
def a_loss_that_is_not_finite_on_one_rank(world: World) -> Any:
    model = decoder()
    trainer = Trainer(model, OPTIMIZER, LossConfig(), world=world)
    before = trainer.flat.data.clone()
    batch = batches(rollout(model, 0), [world.rank])[0]
    if world.rank == 1:
        batch.weight_C[0] = math.nan
    trainer.forward_backward(batch)
    result = trainer.optim_step(1e-2)
    return on_all(world, [result.applied, result.finite, torch.equal(trainer.flat.data, before)])


@check
def weights_read_in_shares(world: World) -> Any:
    """Whether the ranks have all of a folder's weights, bytes that this one read and of all, and of those too small for
    it; and what is said of a number in the second half of a table that is none."""
    whole, counts, read, least = decoder(), list[int](), tensor_file._read, parts.MIN_SHARED_ELEMENTS
    tensor_file._read = lambda *given: (counts.append(given[2].nbytes), read(*given))[1]
    with TemporaryDirectory() as made:
        folder = Path(world.broadcast_from_first(lambda: made))
        world.broadcast_from_first(lambda: save_model(whole, folder))
        parts.MIN_SHARED_ELEMENTS = 4 * whole.config.hidden_size
        model = read_in_shares(folder, world)
        same = all(map(torch.equal, model.parameters(), whole.parameters()))
        tensors = [p for p in whole.parameters() if p.numel() < parts.MIN_SHARED_ELEMENTS]
        sizes = [sum(counts), sum(p.nbytes for p in whole.parameters())], sum(p.nbytes for p in tensors)
        with torch.no_grad():
            whole.embed[-1, -1] = math.nan
        world.broadcast_from_first(lambda: save_model(whole, folder))
        try:
            message = str(read_in_shares(folder, world))
        except InputError as error:
            message = str(error)
        world.gather(None)
    tensor_file._read, parts.MIN_SHARED_ELEMENTS = read, least
    return on_all(world, [same, *sizes, message])


def read_in_shares(folder: Path, world: World) -> Decoder:
    model = world.run_on_all(lambda: load_part(FolderWeights(folder), DTYPE, DEVICE, ONE_RANK, world.replicas))
    all_gather_shares(model, world.replicas)
    return model


@check
def brought_rollouts(world: World) -> Any:
    """Groups of two turns and two branches with experts' digests, each sampled by a rank and brought to a rank, and
    then to the first: whether they are whole where they were brought, and what reading others raises."""
    whole = [sampled_group(g) for g in range(6)]
    sampled = world.gather_results(
        lambda: [g for g in whole if g.sampled_by == world.rank], lambda own: list(map(outline, own))
    )
    groups = sorted((group for of_rank in sampled for group in of_rank), key=lambda group: group.group)
    holders, found = RolloutHolders(world), []
    for _ in range(2):  # the second time nothing travels
        holders.send_missing((group, [group.group // 2 % 2]) for group in groups)
    for group, expected in zip(groups, whole, strict=True):
        try:
            here: Any = words_of(group) == words_of(expected)
        except RuntimeError as error:
            here = str(error)
        found.append([world.rank in (group.sampled_by, group.group // 2 % 2), here])
    holders.send_to_first(groups)()
    return on_all(world, [found, [asdict(a) == asdict(b) for a, b in zip(groups, whole, strict=True)]])


def words_of(group: RolloutGroup) -> list[Any]:
    return [list(getattr(s, name) or ()) for r in group.rollouts for s in r.segments for name in COLUMNS]


def sampled_group(number: int) -> RolloutGroup:
    """Of two samples, whose prompt is the same; every word is another."""
    words = iter(range(1000 * number, 1000 * number + 999))

    def take(count: int) -> list[int]:
        return [next(words) for _ in range(count)]

    def segment(count: int, sampled: bool, **more: Any) -> Segment:
        logs = [[-1 / (1 + n) for n in take(count)] for _ in range(2)] if sampled else [None, None]
        logs = [log and torch.tensor([*log[1:], -math.inf]).tolist() for log in logs]
        versions = [7] * count if sampled else None
        return Segment(take(count), sampled, *logs, versions, take(count), f"text {number}", **more)  # type: ignore[arg-type]

    prompt, routes = take(3 + number), take(3 + number)
    rollouts = [
        Trajectory(
            [
                Segment(list(prompt), route_digests=list(routes)),
                segment(4, True),
                segment(2, False, begins_branch=sample == 1),
            ]
            + [segment(3, True, rewards={"own": 1.0})],
            identity=SampleIdentity(0, 0, 0, number, sample),
            extra={"note": number},
        )
        for sample in range(2)
    ]
    return RolloutGroup(rollouts, FILTERED, number, f"prompt {number}", {"row": number}, sampled_by=number % 2)


@check
def broadcast_serialized(world: World) -> Any:
    """Bytes that a rank receives of what the first makes, from collectives of either kind."""
    from torch.distributed import distributed_c10d as c10d

    received: list[int] = []
    broadcast, all_gather = c10d.broadcast, c10d.all_gather
    c10d.broadcast = lambda x, *a, **k: (received.append(x.nbytes), broadcast(x, *a, **k))[1]
    c10d.all_gather = lambda xs, *a, **k: (received.append(sum(x.nbytes for x in xs)), all_gather(xs, *a, **k))[1]
    try:
        found = world.broadcast_serialized(lambda: b"graph" * 200_000, bytes, bytes)
    finally:
        c10d.broadcast, c10d.all_gather = broadcast, all_gather
    return on_all(world, [found == b"graph" * 200_000, sum(received)])


@check
def agreement(world: World) -> Any:
    """What one rank raises, all raise, and the first reports; ranks that differ are refused by name."""

    def fails() -> None:
        if world.rank == 1:
            raise InputError("row 7 is bad")

    found = []
    for call in (
        lambda: world.gather_results(fails),
        lambda: world.require_same("these ranks", lambda: {"alike": 1, "torch": f"2.{world.rank}"}),
        lambda: world.broadcast_from_first(lambda: 1 // 0),
    ):
        try:
            call()
        except LockstepError as error:
            found.append([type(error).__name__, str(error), getattr(error, "reported", None)])
        except ZeroDivisionError as error:
            found.append([type(error).__name__, getattr(error, "reported", None)])
    found.append(world.broadcast_from_first(lambda: world.rank))
    return on_all(world, found)


@check
def threads_of_graphs_collectives(world: World) -> Any:
    """How many run those of one group on a CPU."""
    groups = world._bound.values() if not world.on_gpu else []
    return on_all(world, [group._get_backend(torch.device("cpu")).options._threads for group in groups])
