"""Environments of other libraries, unchanged: each trains 20 steps with a tiny model, all sampled tokens compared.

TRL's examples are read from a folder that is named (`--trl`: grpo_2048.py, grpo_agent.py and grpo_trainer.md of its
repository, and `peft` installed, which the first imports); tasks of reasoning-gym need that package; those of
verifiers need the package with its extra `ta`, uv, and its example environments in a folder that is named
(`--verifiers`: glossary and scratchpad of its repository). An environment of OpenEnv is a server of its own, from a
folder that is named (`--openenv`: maze_env of its repository, with `openenv` 0.4.1 installed), and is played through
verifiers. The models of examples are random but for their last layer, which makes them call a tool, or move, as a rule.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import Report, made_by

from lockstep.config import RunConfig, SamplingConfig, TaskConfig, TrainerConfig
from lockstep.models import Decoder, ModelConfig, save_model
from lockstep.models.init import initialize
from lockstep.models.tokenizer import IM_END, byte_tokenizer, save_tokenizer
from lockstep.run.train import train

TASKS = ("leg_counting", "gcd", "chain_sum", "spell_backward", "number_sorting")
TEMPLATE = """{% if tools %}<|im_start|>system
Call with <tool_call>: {{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}</tool_call>{% endfor %}\
<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
NOT_RUN = {
    "trl grpo_agent's data": "on the hub: a database of twenty rows with its columns stands for it",
    "trl openenv/*": "clients of environments that are packages on the hub and servers of their own",
    "trl harbor/*, openreward/*": "Docker, or a service",
    "trl carla_vlm*, browsergym*": "images",
    "verifiers textarena's words": "a download: a list of ten stands for it; Wordle's tagger has none",
    "verifiers reverse_text, alphabet_sort, gsm8k, wiki_search": "data on the hub",
    "openenv's other environments": "more packages, Docker, or data on the hub; grid_world_env answers one at a time",
    "verifiers openenv_wordle, nemo_gym": "a server on the hub, or services; PyPI has no nemo-gym for this Python",
    "verifiers kuhn_poker, proposer_solver": "several agents an episode: refused, as a rollout is one agent's",
    "harbor": "PyPI has none for this Python; its tasks are Docker's",
    "verifiers harbor, deepwiki, *_interception": "Docker, a service, or another's program",
    "verifiers color_codeword": "images",
}
# Tokens of Qwen's own tokenizer that the package's renderer of it looks for.
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
WORDS = ("about", "crane", "eagle", "house", "light", "music", "ocean", "plant", "river", "table")
COLUMNS = ("Alt_IDs_Interactor_A", "Alt_IDs_Interactor_B", "Aliases_Interactor_A", "Aliases_Interactor_B")


def calling_model(
    folder: Path, script: Sequence[str | Sequence[str]], marks: Sequence[str] = (), context: int = 4096
) -> Path:
    """A model folder whose answers follow `script`, of several texts at a place one or the other, as a rule; `marks`
    are further tokens."""
    steps = [*((step,) if isinstance(step, str) else tuple(step) for step in script), (IM_END,)]
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(list(marks))
    tokenizer.add_tokens([text for step in steps[:-1] for text in step])
    tokenizer.chat_template = TEMPLATE
    end = tokenizer.convert_tokens_to_ids(IM_END)
    config = ModelConfig(
        512, 128, 64, 1, 2, 1, 32, context, tie_word_embeddings=False, eos_token_ids=(end,), family="qwen3"
    )
    model = initialize(Decoder(config, torch.float32), seed=0)
    ids = [[tokenizer.convert_tokens_to_ids(text) for text in step] for step in steps]
    ids.insert(0, tokenizer.encode("\n", add_special_tokens=False))  # that ends the generation prompt
    with torch.no_grad():
        model.layers[0].o.zero_()
        model.layers[0].down.zero_()
        model.embed.normal_(generator=torch.Generator().manual_seed(1))
        for here, following in zip(ids, ids[1:], strict=False):
            for token in here:
                for after in following:
                    model.lm_head[after] += 0.2 * model.embed[token]
    save_model(model, folder)
    save_tokenizer(tokenizer, folder)
    return folder


def call(name: str, argument: str, values: Sequence[str]) -> list[str | Sequence[str]]:
    """The script of a call with one of these values, in JSON."""
    return [f'<tool_call>{{"name": "{name}", "arguments": {{"{argument}": ', values, "}}</tool_call>"]


def trl_runs(examples: Path, work: Path) -> dict[str, RunConfig]:
    """TRL's examples as runs; what is changed is the model, and the data of `grpo_agent`, which is on the hub."""
    game, agent = examples / "grpo_2048.py", examples / "grpo_agent.py"
    page = (examples / "grpo_trainer.md").read_text()
    block = next(b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class IncrementEnv" in b)
    (work / "increment.py").write_text(block.partition("trainer = ")[0])
    with sqlite3.connect(work / "biogrid.db") as database:
        database.execute(f"CREATE TABLE interactions ({', '.join(f'{name} TEXT' for name in COLUMNS)})")
        database.executemany("INSERT INTO interactions VALUES (?, ?, ?, ?)", [(f"gene:{i}",) * 4 for i in range(20)])
    moves = [json.dumps(way) for way in ("up", "down", "left", "right")]
    where = [json.dumps(f"SELECT * FROM interactions WHERE {COLUMNS[0]} = 'gene:{i}'") for i in (3, 300)]
    queries = [*where, '"SELECT nothing"']
    answers = [{"answer": "Yes", "prompt": "Does gene 3 interact?"}, {"answer": "No", "prompt": "Does gene 9?"}]
    of = {
        "grpo_2048": (call("move", "direction", moves), {"environment": f"{game}:Game2048Env"}, ["reward_score"], game),
        "grpo_agent": (
            call("query_biogrid", "sql_command", queries),
            {"tools": (f"{agent}:query_biogrid",)},
            ["correctness_reward", "structure_reward", "query_reward"],
            agent,
        ),
        "grpo_trainer.md IncrementEnv": (
            call("increment", "step", ["1", "2", "3"]),
            {"environment": f"{work / 'increment.py'}:IncrementEnv"},
            [],
            None,
        ),
    }
    runs = {}
    for name, (script, given, rewards, source) in of.items():
        data = work / f"{name.partition(' ')[0]}.jsonl"
        rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in answers * 4]
        data.write_text("\n".join(map(json.dumps, rows)))
        model = str(calling_model(work / f"{data.stem}-model", script))
        specs = tuple(f"{source}:{reward}" for reward in rewards)
        task = TaskConfig("dataset", str(data), reward=specs, max_turns=4, validation_prompts=0, **given)
        runs[name] = replace(small(task), model=model, sampling=SamplingConfig(max_completion_length=40))
    return runs


def verifiers_runs(examples: Path, work: Path) -> dict[str, RunConfig]:
    """Tasksets of verifiers as runs: two with tools, one that answers turns."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(examples), os.environ.get("PYTHONPATH")]))
    os.environ["NLTK_DATA"] = str(work / "nltk")
    sys.path.insert(0, str(examples))
    (work / "nltk/corpora/words").mkdir(parents=True)
    for name in ("en", "en-basic"):
        (work / "nltk/corpora/words" / name).write_text("\n".join(WORDS))
    letters = [f"[{letter}]" for letter in "EARIT"]
    of: dict[str, list[str | Sequence[str]]] = {
        "glossary": tool_call("facts_lookup", "name", ['"Ada Lovelace"', '"Alan Turing"', '"nobody"']),
        "scratchpad": tool_call("scratchpad_roundtrip", "word", ['"alpha"', '"bravo"', '"charlie"']),
        'textarena,game="Hangman-v0"': ["I guess ", letters],
    }
    runs = {}
    for number, (name, script) in enumerate(of.items()):
        model = str(calling_model(work / f"verifiers{number}", script, MARKS))
        data = f'verifiers:{name},renderer="qwen3",size=12'
        limits: dict[str, Any] = {"max_turns": 3, "max_response_length": 1500, "environment_timeout": 300.0}
        task = TaskConfig("dataset", data, environment="verifiers", validation_prompts=0, **limits)
        sampling = SamplingConfig(num_generations=2, max_completion_length=24)
        run = replace(small(task), model=model, sampling=sampling)
        runs[f"verifiers:{name}"] = replace(run, trainer=replace(run.trainer, prompts_per_step=1))
    return runs


SERVE_MAZE = """
import sys, uvicorn
from maze_env.server.app import MazeAction, MazeEnvironment, MazeObservation, create_app
app = create_app(MazeEnvironment, MazeAction, MazeObservation, env_name="maze_env", max_concurrent_envs=16)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


@contextlib.contextmanager
def openenv_runs(examples: Path, work: Path) -> Iterator[dict[str, RunConfig]]:
    """An environment of OpenEnv as a run, beside its server; its classes are as they are."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-c", SERVE_MAZE, str(port)], cwd=examples)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(240):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/schema", timeout=1):
                break
            time.sleep(0.5)
        model = str(calling_model(work / "openenv", [list("0123")], MARKS, 8192))
        data = f'verifiers:openenv,base_url="{url}",resets=[{{}}],renderer="qwen3"'
        limits: dict[str, Any] = {"max_turns": 3, "max_response_length": 3000, "environment_timeout": 300.0}
        task = TaskConfig("dataset", data, environment="verifiers", validation_prompts=0, **limits)
        sampling = SamplingConfig(num_generations=4, max_completion_length=8)
        run = replace(small(task), model=model, sampling=sampling)
        yield {"verifiers:openenv maze_env": replace(run, trainer=replace(run.trainer, prompts_per_step=1))}
    finally:
        server.terminate()
        server.wait()


def tool_call(name: str, argument: str, values: Sequence[str]) -> list[str | Sequence[str]]:
    """`call` as Qwen3 writes it."""
    start, *rest = call(name, argument, values)
    return [MARKS[0], "\n" + str(start).removeprefix(MARKS[0]), rest[0], "}}\n", MARKS[1]]


def small(task: TaskConfig) -> RunConfig:
    """20 steps of a tiny model."""
    return RunConfig(
        steps=20,
        device="cpu",
        task=task,
        sampling=SamplingConfig(num_generations=4, max_completion_length=16),
        trainer=TrainerConfig(prompts_per_step=2, skip_zero_variance=False, max_idle_steps=20),
    )


def gym_run(name: str) -> RunConfig:
    """A task of reasoning-gym."""
    data = f"reasoning_gym:{name},size=60"
    return small(TaskConfig("dataset", data, reward=("reasoning_gym",), validation_prompts=4))


def outcome(config: RunConfig, folder: Path) -> dict[str, Any]:
    """What a run came to: steps, sampled tokens and those that were compared, turns, rewards."""
    began = time.perf_counter()
    summary = train(config, folder, resume=False)
    lines = [json.loads(line) for line in (folder / "rollouts.jsonl").read_bytes().splitlines()]
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    samples = [sample for line in lines for sample in line["samples"]]
    certificate = json.loads((folder / "parity.json").read_text())
    several = [step for step in steps if "environment/turns" in step]
    return {
        "steps": summary["steps_done"],
        "sampled_tokens": sum(len(sample["token_ids"]) for sample in samples),
        "tokens_checked": certificate["tokens_checked"],
        "identical": certificate["identical"],
        "turns": sum(step["environment/turns"] for step in several) / len(several) if several else 1.0,
        "reward": sum(sample["reward"] for sample in samples) / len(samples),
        "rewards": sorted({name for sample in samples for name in sample["rewards"]}),
        "errors": sum(step.get("environment/errors", 0) for step in steps),
        "seconds": time.perf_counter() - began,
    }


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trl", type=Path, metavar="FOLDER", help="with TRL's examples")
    parser.add_argument("--verifiers", type=Path, metavar="FOLDER", help="with example environments of verifiers")
    parser.add_argument("--openenv", type=Path, metavar="FOLDER", help="with environments of OpenEnv")
    parser.add_argument("--add", action="store_true", help="keep what the file has of runs that are not run again")
    parser.add_argument("--tasks", nargs="*", default=TASKS, metavar="NAME", help="of reasoning-gym")


def measure(args: argparse.Namespace, report: Report) -> bool:
    found: dict[str, dict[str, Any]] = {}
    report.figures |= {"runs": found, "not_run": NOT_RUN}
    report.path = report.path and report.path.resolve()
    if args.add and report.path is not None and report.path.exists():
        kept = json.loads(report.path.read_text())
        found.update({name: {"commit": kept["commit"], **one} for name, one in kept["runs"].items()})
    given, here = args.trl and args.trl.resolve(), Path.cwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        work = Path(folder)
        os.chdir(work)  # where the examples' files are
        try:
            runs = {f"trl {name}": run for name, run in trl_runs(given, work).items()} if given else {}
            runs |= {f"reasoning_gym:{name}": gym_run(name) for name in args.tasks}
            if args.verifiers:
                runs |= verifiers_runs(here / args.verifiers, work)
            if args.openenv:
                runs |= stack.enter_context(openenv_runs(here / args.openenv, work))
            for number, (name, run) in enumerate(runs.items()):
                print(name, file=sys.stderr, flush=True)
                found[name] = outcome(run, work / f"run{number}") | {"commit": made_by()["commit"]}
                report.save()
        finally:
            os.chdir(here)
    rows = [["", "steps", "tokens", "compared", "turns", "reward"]]
    for name, one in found.items():
        counts = [f"{one[key]:,}" for key in ("steps", "sampled_tokens", "tokens_checked")]
        rows.append([name, *counts, f"{one['turns']:.2f}", f"{one['reward']:.3f}"])
    report.tables.append(rows)
    return not all(one["identical"] and one["tokens_checked"] == one["sampled_tokens"] for one in found.values())
