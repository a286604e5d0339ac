"""The generator's graphs held to eager's bits: every bucket, and the cache as it was."""

from __future__ import annotations

import pytest
import torch
from fake_recorder import FakeRecorder

from lockstep.config import CompileConfig, GeneratorConfig
from lockstep.generator import Engine, SharedWeights
from lockstep.graph import GraphError, Runtime, check_against_eager
from lockstep.models import Decoder, ModelConfig
from lockstep.models.init import initialize
from lockstep.types import SampleIdentity, SamplingParams

SAMPLING = SamplingParams(temperature=0.8, top_p=0.9, n=3, max_completion_length=40)


def make(mode: str, cache_tokens: int = 1024, recorder: FakeRecorder | None = None) -> tuple[Runtime, Engine]:
    config = ModelConfig(97, 32, 48, 2, 2, 1, 16, rope_theta=1e4, max_position_embeddings=256, family="qwen3")
    model = initialize(Decoder(config, torch.float32), 0)
    runtime = Runtime(CompileConfig("step", mode), torch.device("cpu"), recorder=recorder or FakeRecorder())
    engine = Engine(SharedWeights(model), GeneratorConfig(page_size=8), cache_tokens, runtime=runtime)
    engine.warm_up(5, 120, SAMPLING)
    return runtime, engine


@pytest.mark.parametrize(("mode", "cache_tokens"), [("full", 1024), ("piecewise", 1024), ("none", 256)])
def test_every_graph_passes_and_the_cache_is_as_it_was(mode: str, cache_tokens: int) -> None:
    runtime, engine = make(mode, cache_tokens)
    runtime.end_warm_up()
    rows, cache = engine.runner.rows, engine.cache
    cache.k.normal_()
    before = [t.clone() for t in (cache.k, cache.v, rows.table, *rows.tensors(4).values())]
    verdicts = {v.function: v for v in check_against_eager(runtime, engine.check_cases(), "strict")}
    assert set(verdicts) == {"decode", "mixed"} and runtime.recompiles == 0
    assert verdicts["decode"].cases >= 6 and verdicts["mixed"].cases >= 3
    after = [cache.k, cache.v, rows.table, *rows.tensors(4).values()]
    assert all(map(torch.equal, after, before))


def test_a_warm_up_after_generations_launches_with_none_of_their_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of fewer rows would read and write at rows that they do not have."""
    _, engine = make("none", 4096)
    runner, groups, n = engine.runner, list[int](), 8
    sampling = SamplingParams(n=n, max_completion_length=4, ignore_eos=True)
    identities = [SampleIdentity(0, 0, 0, group) for group in range(3)]
    engine.generate([[token] * 100 for token in range(3)], [sampling] * 3, identities)
    assert runner.rows.tensors(3 * n)["groups"].max() == 3 * n - 1  # left behind

    def seen(rows: int) -> None:
        groups.append(int(runner.rows.tensors(rows)["groups"].max()))

    decode, mixed = runner._decode_program, runner._mixed_program
    monkeypatch.setattr(runner, "_decode_program", lambda rows: (seen(rows), decode(rows))[1])
    monkeypatch.setattr(runner, "_mixed_program", lambda sizes: (seen(sizes.rows), mixed(sizes))[1])
    engine.warm_up(5, 120, SAMPLING)
    assert len(groups) > 4 and set(groups) == {-1}


class Stale(FakeRecorder):
    """Replays read a copy of the cache: what they write, nobody else sees."""

    def record(self, run, arguments, keep=(), lasting=()):
        recording = super().record(run, arguments, keep, lasting)
        recording._memory = [m.clone() if m.dim() == 5 else m for m in recording._memory]
        return recording


def test_a_replay_on_another_cache_is_named() -> None:
    runtime, engine = make("full", recorder=Stale())
    with pytest.raises(
        GraphError, match=r"decode\(.*case '5 rows': replay differs .* node select \(aten.select\) of layers.0"
    ):
        check_against_eager(runtime, engine.check_cases(), "strict")
