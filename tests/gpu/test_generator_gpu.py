"""The generator on a GPU: recorded decode and mixed steps, launched ahead of the host, against eager single steps."""

import random
from dataclasses import replace

import pytest
import torch
from small import finished
from torch import Tensor

from lockstep import ops
from lockstep.config import CompileConfig, GeneratorConfig
from lockstep.generator import Engine, SharedWeights
from lockstep.graph import Runtime
from lockstep.models import Decoder, ModelConfig
from lockstep.models.init import initialize
from lockstep.ops.decode_update import operator as decode_update_operator
from lockstep.types import Completion, SampleIdentity, SamplingParams

DEVICE = torch.device("cuda")
CONFIG = ModelConfig(2000, 256, 512, 3, 4, 2, 64, max_position_embeddings=2048, family="qwen3")
KINDS = (SamplingParams(n=8), SamplingParams(n=3, temperature=0.8, top_p=0.95), SamplingParams(temperature=0.0))


@pytest.mark.parametrize("rows", [1, 40, 129, 512])
def test_rows_move_on_as_on_a_cpu(rows: int) -> None:
    torch.manual_seed(rows)
    remaining = torch.randint(0, 4, (rows,), dtype=torch.int32)
    state = [
        torch.randint(0, 6, (rows,)),
        torch.randn(rows),
        torch.randn(rows),
        torch.randint(-1, 6, (rows, 4)),
        torch.randint(0, 6, (rows,)),
        torch.where(remaining == 0, 0, torch.randint(0, 80, (rows,))),
        remaining,
        torch.zeros(rows, 3, 8, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int64),
    ]
    table = torch.randint(0, 1000, (rows, 6), dtype=torch.int32)  # rows move on into the last page
    on_gpu = [t.to(DEVICE) for t in state]
    for _ in range(3):
        expected = decode_update_operator.decode_slots(state[5], state[6], table, 16, 1000)
        found = ops.decode_slots(on_gpu[5], on_gpu[6], table.to(DEVICE), 16, 1000)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))
        for x in (state, on_gpu):
            ops.decode_advance(ops.SampledTokens(*x[:3]), ops.DecodeRows(*x[3:9]), *x[9:])
        assert all(torch.equal(a.cpu(), b) for a, b in zip(on_gpu, state, strict=True))


def requests(seed: int, count: int) -> list[tuple[list[int], SamplingParams, SampleIdentity]]:
    draw = random.Random(seed)
    return [
        (
            [draw.randrange(2000) for _ in range(draw.choice([1, 60, 145, 400, 900]))],
            replace(
                KINDS[group % len(KINDS)],
                max_completion_length=draw.randint(1, 150),
                stop_token_ids=tuple(draw.sample(range(2000), draw.choice([0, 4, 40]))),
            ),
            SampleIdentity(7, 0, seed, group),
        )
        for group in range(count)
    ]


def tensors(completions: list[list[Completion]]) -> list[Tensor]:
    flat = [c for group in completions for c in group]
    return [
        torch.tensor([t for c in flat for t in c.token_ids]),
        torch.tensor([p for c in flat for p in c.logprobs]),
        torch.tensor([p for c in flat for p in c.model_logprobs]),
    ]


def test_recorded_blocks_are_eager_single_steps_and_nothing_is_captured_late(census) -> None:
    model = initialize(Decoder(CONFIG, torch.bfloat16, DEVICE), 0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    runtime = Runtime(CompileConfig("step", "full"), DEVICE)
    config = GeneratorConfig(max_num_seqs=64, max_num_batched_tokens=2048)
    recorded = Engine(SharedWeights(model), config, 40_000, runtime=runtime)
    eager = Engine(SharedWeights(model), replace(config, steps_per_sync=1), 40_000, ahead=0)
    for kind in KINDS:
        recorded.warm_up(64, 1100, kind)
    runtime.end_warm_up()
    draw = random.Random(0)
    for seed in range(2):
        for kind in range(len(KINDS)):  # each alone: no graphs for mixtures were made
            wanted = requests(seed, 30)[kind :: len(KINDS)]
            waiting, ids, done = list(wanted), [], {}
            while waiting or recorded.scheduler.busy:
                while waiting and (draw.random() < 0.3 or not recorded.scheduler.busy):
                    ids.append(recorded.add_request(*waiting.pop(0)))
                done |= finished(recorded)
            expected = eager.generate(*map(list, zip(*wanted, strict=True)))
            for a, b in zip(tensors([done[i] for i in ids]), tensors(expected), strict=True):
                assert census("recorded blocks, eager steps", a, b) == 0
    assert runtime.recompiles == 0 and runtime.replays["mixed"] > 10 and runtime.replays["decode"] > 100
    runtime.close()
