"""A run of an earlier tree, with its checkpoint and its model: resumed, replayed, reported and asked, bit for bit.

`python tests/run/old_runs.py TREE` makes one with the package in the folder TREE (its C library built, if it is to
compute here) and checks it; `--keep FILE` keeps it for `test_old_runs.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from lockstep import LLM
from lockstep.cli.main import main
from lockstep.session import golden
from lockstep.types import SamplingParams

STEPS, RESUMED_AT = 3, 1
TIMED = ("time/", "perf/", "memory/")
REWARD = "def first(completion_ids, **_):\n    return [ids[0] % 7 / 7 for ids in completion_ids]\n"
TRAIN = [
    *("train", "dataset", "--model", "model", "--data", "rows.jsonl", "--reward", "reward.py:first"),
    *("--run-dir", "whole", "--steps", str(STEPS), "--checkpoint.interval", "1", "--checkpoint.keep-last", str(STEPS)),
    *("--trainer.prompts-per-step", "2", "--sampling.num-generations", "4", "--sampling.max-completion-length", "6"),
    *("--sampling.top-p", "0.9", "--sampling.temperature", "0.8", "--task.validation-prompts", "0"),
    *("--optimizer.learning-rate", "1e-3", "--device", "cpu", "--metrics.no-progress"),
]
ASKED = ["1 + 2 = ", "30 - 4 = "]
# What the earlier tree runs: a model of one layer whose weights tell tokens apart, a run of it, its own answers.
MAKE = f"""
import json
from pathlib import Path
import torch
from lockstep import LLM
from lockstep.models import Decoder, ModelConfig, save_model
from lockstep.models.init import initialize
from lockstep.types import SamplingParams
try:
    from lockstep.cli.main import main
    from lockstep.models.tokenizer import byte_tokenizer, save_tokenizer
except ImportError:  # before the package had rooms
    from lockstep.cli import main
    from lockstep.tokenizer import byte_tokenizer, save_tokenizer

config = ModelConfig(260, 8, 8, 1, 1, 1, 8, 128, eos_token_ids=(256,), family="qwen3")
model = initialize(Decoder(config, torch.float32), 0)
for parameter in model.parameters():
    parameter.data.mul_(8.0 if parameter.dim() > 1 else 1.0)
save_model(model, Path("model"))
save_tokenizer(byte_tokenizer(), Path("model"))
assert main({TRAIN!r}) == 0
found = LLM("whole/model", device="cpu").generate({ASKED!r}, SamplingParams(max_completion_length=8, n=2))
Path("answers.json").write_text(json.dumps([[(c.token_ids, c.logprobs) for c in group] for group in found]))
"""


def make(tree: Path, folder: Path) -> None:
    """Into the empty `folder`: `model`, `whole` (an unbroken run), what it read, `answers.json`, and `words.json`, this
    machine's arithmetic."""
    rows = [{"prompt": f"{a} + {b} = "} for a in range(4) for b in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "LOCKSTEP_CACHE": cache}
        subprocess.run([sys.executable, "-c", MAKE], cwd=folder, env=environment, check=True)
    recorded = words()
    if golden.GRADIENT_NORM not in (folder / "whole" / "checkpoints" / "step_1" / "state.json").read_text():
        del recorded[golden.GRADIENT_NORM]  # the tree had another
    (folder / "words.json").write_text(json.dumps(recorded))


def words() -> dict[str, str]:
    """What this machine computes, and what checkpoints recorded before they had words."""
    recorded = {"torch": torch.__version__, "device": torch.backends.cpu.get_cpu_capability()}
    draw, products = torch.Generator().manual_seed(0), hashlib.sha256()  # of the library, as gradients of weights are
    for rows, inner, columns in itertools.product((8, 24, 260), range(48, 150, 7), (8, 24)):
        a, b = (torch.randn(inner, size, generator=draw) for size in (rows, columns))
        products.update((a.t() @ b).numpy().tobytes())
    recorded["products of small matrices"] = products.hexdigest()[:16]
    return recorded | golden.compute_words(torch.device("cpu"), torch.float32)


def keep(folder: Path, archive: Path) -> None:
    """All of it but the report and the checkpoints after the one that is resumed."""
    left_out = ("report.html", *(f"step_{step}" for step in range(RESUMED_AT + 1, STEPS + 1)))
    with tarfile.open(archive, "w:xz") as file:
        file.add(folder, ".", filter=lambda entry: None if entry.name.endswith(left_out) else entry)


def trained(run: Path) -> dict[str, Any]:
    """All that two runs of the same bits have in common."""
    found: dict[str, Any] = {"parity": json.loads((run / "parity.json").read_text())}
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
        found[name] = [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in lines]
    weights = load_file(run / "model" / "model.safetensors")
    return found | {name: weight.view(torch.int32).tolist() for name, weight in weights.items()}


def known(found: Any, names: Any) -> Any:
    """`found` without what an earlier version did not record."""
    if isinstance(names, dict):
        return {name: known(found[name], names[name]) for name in names}
    return list(map(known, found, names)) if isinstance(names, list) and len(found) == len(names) else found


def check(folder: Path) -> None:
    """What `make` left in `folder` goes on from its first step, is replayed, reported, and its model asked: everything
    has its bits, unless this machine's arithmetic is another than that which wrote it."""
    recorded = json.loads((folder / "words.json").read_text())
    same = known(words(), recorded) == recorded
    whole, again = folder / "whole", folder / "again"
    unbroken, answers = trained(whole), json.loads((folder / "answers.json").read_text())
    with LLM(whole / "model", device="cpu") as llm:
        found = llm.generate(ASKED, SamplingParams(max_completion_length=8, n=2))
    for folder_of_later in ("model", *(f"checkpoints/step_{step}" for step in range(RESUMED_AT + 1, STEPS + 1))):
        shutil.rmtree(whole / folder_of_later, ignore_errors=True)
    with chdir(folder):
        assert main(["train", "--resume", "whole", *([] if same else ["--resume-with-other-numerics"])]) == 0
        assert main(["train", "--config", "whole/config.yaml", "--run-dir", "again"]) == 0
        assert main(["report", "whole"]) == 0
    resumed, replayed = trained(whole), trained(again)
    assert len(resumed["metrics.jsonl"]) == STEPS and resumed["parity"]["identical"]
    assert "identical" in (whole / "report.html").read_text()
    if not same:
        print("other arithmetic than that of the run: its bits are not compared")
        return
    assert [[[c.token_ids, c.logprobs] for c in group] for group in found] == answers
    told = resumed["parity"]["settings"].get("resumed_with_other_numerics", [])
    if golden.GRADIENT_NORM not in recorded:  # it has the last bits of the exact sum's root, and the run says so
        assert [entry["steps_done"] for entry in told] == [RESUMED_AT] and "gradient norm" in told[0]["changed"][0]
        for run in (resumed, replayed):
            for now, then in zip(run["metrics.jsonl"], unbroken["metrics.jsonl"], strict=True):
                assert abs(now["grad_norm"] / then["grad_norm"] - 1) < 2**-22
                now["grad_norm"] = then["grad_norm"]
    else:
        assert not told
    for run in (resumed, replayed):
        for name, expected in unbroken.items():
            assert known(run[name], expected) == expected, name


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", type=Path, help="a checkout of an earlier commit")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="also write what was made here, as .tar.xz")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        make(given.tree.resolve(), Path(scratch))
        if given.keep:
            keep(Path(scratch), given.keep)
        check(Path(scratch))
    print("resumed, replayed, reported and asked")
