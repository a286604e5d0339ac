"""What each command does, from its flags to its output. Torch is imported only once the flags are known to be valid."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import api
from ..config import (
    EVALUATION_FIELDS,
    GeneratorConfig,
    RunConfig,
    TaskConfig,
    check_generation,
    recipes,
    template_variables,
    validate,
    yaml_file,
)
from ..config.yaml_file import suggest
from ..errors import InputError, refuse
from ..machine import server_api_key, torchrun_launch
from ..run.closing_lines import align_rows, describe_outcome
from ..serve.settings import Settings
from .flags import Chat, Eval, Generate, Init, Parity, Plan, Precompile, Replay, Report, Serve, Train

if TYPE_CHECKING:
    from ..session.generate import LLM
    from ..types import Completion, SamplingParams


_MODEL_FLAGS = ("attention", "attention_mask", "compile")  # flags of all commands that use a model
_STREAMING = GeneratorConfig(steps_per_sync=1)  # shows text token by token instead of every few steps


@dataclass(frozen=True)
class Outcome:
    """What a command prints (on the first of several processes) and its exit code. `text` may be a stream, which is
    printed as it arrives."""

    payload: dict[str, Any] = field(default_factory=dict)
    text: Iterable[str] = ()
    code: int = 0


def recipe(name: str, kind: str) -> Callable[..., RunConfig]:
    """The recipe `name`; errors call it a `kind`."""
    if name not in recipes.RECIPES:
        hint = f"a file is named by --config {name}; " if name.endswith((".yaml", ".yml")) else ""
        raise InputError(f"unknown {kind} {name!r}; {hint}{suggest(name, recipes.RECIPES)}")
    return recipes.RECIPES[name]


def _train(flags: Train) -> Outcome:
    summary = api.train(
        flags.to_config(),
        flags.resume or flags.run_dir,
        resume=flags.resume is not None,
        resume_with_other_numerics=flags.resume_with_other_numerics,
    )
    return Outcome(summary, [describe_outcome(summary)])


def _precompile(flags: Precompile) -> Outcome:
    config = validate(yaml_file.check_types(flags.to_config()))
    from ..session.precompile import precompile, render

    result = precompile(config)
    return Outcome(result, [render(result) + "\n"])


def _plan(flags: Plan) -> Outcome:
    refuse(not 1 <= flags.world <= 4096, f"--world is {flags.world}; it must be between 1 and 4096 GPUs")
    refuse(
        not 0 <= flags.device_memory_gib <= 1 << 20,
        f"--device-memory-gib is {flags.device_memory_gib}; it must be a number of GiB, or 0 for this machine's",
    )
    config = validate(yaml_file.check_types(flags.to_config()))
    refuse(
        flags.device_memory_gib > 0 and config.device == "cpu",
        "--device-memory-gib is of GPUs, and the device is cpu; add --device cuda, or leave it out",
    )
    from ..session.build import plan_memory

    plan = plan_memory(config, flags.world, flags.device_memory_gib)
    text = f"{plan.title}\n{plan.table()}\n"
    if flags.device_memory_gib == 0:
        text += "planned for this machine; --device-memory-gib 80 plans for GPUs of 80 GiB\n"
    return Outcome(plan.to_dict(), [text])


def _generate(flags: Generate) -> Outcome:
    refuse((flags.prompt is None) == (flags.prompts is None), "give --prompt TEXT or --prompts FILE, one of the two")
    sampling = _sampling_params(flags, n=flags.n, stop=flags.stop)
    if flags.prompt_column != TaskConfig.prompt_column and (flags.prompts is None or flags.prompts.endswith(".txt")):
        raise InputError("--prompt-column has no effect without rows in --prompts; remove it")
    variables = _template_variables(flags)
    prompts = _read_prompts(flags)
    if variables and all(isinstance(prompt, str) for prompt in prompts):
        raise InputError(
            "--chat-template-kwargs has no effect on text prompts, which go without a template; remove it, or make "
            "them chats with --system-prompt"
        )
    llm = _load_llm(flags, GeneratorConfig() if flags.json else _STREAMING, variables)
    if not flags.json:
        return Outcome(text=_stream_and_close(llm, _texts_in_order(llm, prompts, sampling)))
    with llm:
        results = [list(map(_completion_record, samples)) for samples in llm.generate(prompts, sampling)]
    if flags.prompts is None:
        return Outcome({"model": flags.model, "prompt": prompts[0], "completions": results[0]})
    pairs = [{"prompt": prompt, "completions": result} for prompt, result in zip(prompts, results, strict=True)]
    return Outcome({"model": flags.model, "prompts": pairs})


def _completion_record(completion: Completion) -> dict[str, Any]:
    """What `--json` prints for a completion."""
    names = "token_ids", "logprobs", "model_logprobs", "weight_versions", "text", "finish_reason"
    record = {name: getattr(completion, name) for name in names}
    record["identity"] = asdict(completion.identity)
    return record | {name: getattr(completion, name) for name in ("route_digests", "prompt_route_digests")}


def _read_prompts(flags: Generate) -> list[Any]:
    """The prompt, the prompts of data rows, or the lines of a .txt file, with the system prompt if there is one."""
    from ..environments import RowFormat, read_problems

    row_format = RowFormat(flags.prompt_column, flags.system_prompt)
    source = flags.prompts
    if source is None:
        return [row_format.with_system(flags.prompt or "")]
    if source.endswith(".txt"):
        path = Path(os.path.expanduser(source))
        refuse(path.exists() and not path.is_file(), f"--prompts {source} is not a regular file")
        try:
            lines = path.read_text(encoding="utf-8-sig").split("\n")  # Unicode has more ends of lines
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--prompts {source} cannot be read: {error}") from error
        return [row_format.with_system(line) for line in lines if line.strip()]
    config = TaskConfig(prompt_column=flags.prompt_column, system_prompt=flags.system_prompt)
    return [problem.prompt for problem in read_problems(source, config, field="--prompts")]


def _chat(flags: Chat) -> Outcome:
    refuse(sys.stdin is None, "standard input is closed; give chat a terminal, or its lines through a pipe")
    sampling = _sampling_params(flags)
    variables = _template_variables(flags)
    from . import chat

    llm = _load_llm(flags, _STREAMING, variables)
    conversation = chat.Conversation(llm, sampling, flags.system_prompt, flags.plain)
    return Outcome(text=_stream_and_close(llm, chat.converse(conversation, chat.read_lines())))


def _serve(flags: Serve) -> Outcome:
    name = flags.model if flags.served_model_name is None else flags.served_model_name
    api_key = server_api_key() if flags.api_key is None else flags.api_key
    values = {item.name: getattr(flags, item.name) for item in fields(Settings)}
    settings = Settings(**(values | {"served_model_name": name, "api_key": api_key}))
    settings.validate()
    variables = template_variables(flags.chat_template_kwargs, "--chat-template-kwargs")
    try:
        from ..serve.server import serve
    except ImportError as error:
        raise InputError(f"serve needs packages of its own ({error}): pip install 'lockstep-rl[serve]'") from error
    serve(lambda: _load_llm(flags, settings.generator, variables), settings)
    return Outcome()


def _template_variables(flags: Generate | Chat) -> dict[str, Any]:
    """The chat template's variables, after checking the flags that concern the template."""
    refuse(flags.system_prompt == "", "--system-prompt is empty; give a text, or leave it out")
    return template_variables(flags.chat_template_kwargs, "--chat-template-kwargs")


def _sampling_params(flags: Generate | Chat, **more: Any) -> SamplingParams:
    from ..session.generate import check_sampling
    from ..types import SamplingParams

    names = ("temperature", "top_k", "top_p", "min_p", "max_completion_length")
    sampling = SamplingParams(**{name: getattr(flags, name) for name in names}, **more)
    check_sampling(sampling)
    return sampling


def _load_llm(flags: Generate | Chat | Serve, config: GeneratorConfig, variables: dict[str, Any]) -> LLM:
    from ..session.generate import LLM

    names = ["device", "dtype", "seed", *_MODEL_FLAGS]
    if isinstance(flags, Generate):
        names.append("parallel")
    options = {name: getattr(flags, name) for name in names}
    return LLM(flags.model, **options, config=config, chat_template_kwargs=variables)


def _stream_and_close(llm: LLM, texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts, then free the model's graphs."""
    with llm:
        yield from texts


def _texts_in_order(llm: LLM, prompts: list[Any], sampling: SamplingParams) -> Iterator[str]:
    """The texts one after another: the first unfinished one as it grows, the others when it is their turn."""
    order = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(sampling.n)]
    pending: dict[tuple[int, int], str] = dict.fromkeys(order, "")  # text that was not yielded yet
    finished: set[tuple[int, int]] = set()
    current = 0
    yield _heading(current, len(order))
    for piece in llm.stream(prompts, sampling):
        pending[piece.prompt, piece.sample] += piece.text
        if piece.completion is not None:
            finished.add((piece.prompt, piece.sample))
        yield pending.pop(order[current])
        while order[current] in finished and current + 1 < len(order):
            current += 1
            yield "\n" + _heading(current, len(order)) + pending.pop(order[current])
        pending[order[current]] = ""
    yield "\n"


def _heading(index: int, total: int) -> str:
    return f"--- {index + 1} of {total}\n" if total > 1 else ""


def _eval(flags: Eval) -> Outcome:
    base = recipe(flags.task, "task")("")  # the same for every model, trained or not
    check_generation(flags.compile)
    refuse(not flags.easy and flags.task != "sum-digits", f"--no-easy has no effect on {flags.task}; remove it")
    refuse(flags.held_out and not flags.data, "--held-out has no effect without --data; remove it")
    prompts = base.task.validation_prompts if flags.prompts is None else flags.prompts
    refuse(prompts < 1, f"--prompts is {prompts}; it must be at least 1")
    task = replace(
        base.task,
        easy=flags.easy and flags.task == "sum-digits",
        validation_data=None if flags.held_out else flags.data,
        validation_prompts=prompts,
        **{name: getattr(flags, name) for name in EVALUATION_FIELDS},
    )
    sampling = replace(base.sampling, stop=flags.stop)
    if flags.max_completion_length is not None:
        sampling = replace(sampling, max_completion_length=flags.max_completion_length)
    options = {name: getattr(flags, name) for name in ("model", "seed", "device", "dtype", "parallel", *_MODEL_FLAGS)}
    config = replace(base, task=task, sampling=sampling, **options)
    from ..run.evaluate import evaluate
    from ..session.evaluation import render

    settings = {name: getattr(flags, name) for name in ("n", "k", "temperature", "pass_reward", "pass_threshold")}
    result = evaluate(validate(config), **settings, progress=sys.stderr if torchrun_launch().rank == 0 else None)
    return Outcome(result, [render(result) + "\n"])


def _report(flags: Report) -> Outcome:
    from ..run.report import write_comparison, write_report

    refuse(not flags.runs, "name at least one RUN_DIR, a folder that `lockstep train` wrote")
    for run_dir in flags.runs:
        refuse(not (run_dir / "config.yaml").is_file(), f"{run_dir} is not a run folder (it has no config.yaml)")
    if len(flags.runs) == 1:
        path = write_report(flags.runs[0], flags.out)
    elif flags.out is None:
        raise InputError(f"{len(flags.runs)} runs are compared on a page of their own: name it with --out FILE.html")
    else:
        path = write_comparison(flags.runs, flags.out)
    return Outcome({"report": str(path)}, [f"{path}\n"])


def _replay(flags: Replay) -> Outcome:
    from ..run.replay import replay

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    result = replay(flags.run, flags.trajectory, flags.call_tools, tell)
    return Outcome(result.to_dict(), [result.render() + "\n"], code=1 if result.difference else 0)


def _parity(flags: Parity) -> Outcome:
    from ..session.parity_check import check_model

    options = [getattr(flags, name) for name in ("tokens", "seed", "device", "dtype", *_MODEL_FLAGS, "parallel")]
    report = check_model(flags.model, *options)
    return Outcome(report.to_dict(), [report.render() + "\n"], code=0 if report.identical else 1)


def _init(flags: Init) -> Outcome:
    from ..models.init import init_folder

    summary = init_folder(flags.arch, flags.out, flags.seed, flags.tokenizer, flags.vocab_size)
    return Outcome(summary, [align_rows({name: str(value) for name, value in summary.items() if value is not None})])


COMMANDS: dict[type, Callable[[Any], Outcome]] = {
    Train: _train,
    Precompile: _precompile,
    Plan: _plan,
    Generate: _generate,
    Eval: _eval,
    Chat: _chat,
    Serve: _serve,
    Report: _report,
    Parity: _parity,
    Init: _init,
    Replay: _replay,
}
MULTIPROCESS_COMMANDS = Train, Precompile, Generate, Eval, Parity  # commands that several processes may run together
