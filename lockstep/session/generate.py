"""Generation with a model folder, the basis of `lockstep generate`, `eval` and `chat`."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from ..config import (
    GENERATION_LAYOUT_FIELDS,
    MAX_SEED,
    Attention,
    CompileConfig,
    GeneratorConfig,
    ParallelConfig,
    RunConfig,
    SamplingConfig,
    check_generation,
    check_layout,
    check_range,
    given_or_default,
    validate,
)
from ..environments import checked_messages
from ..environments.tools import tool_schema
from ..errors import InputError, LockstepError, NonFiniteError, refuse
from ..generator import Engine, pays_to_group
from ..machine import require_torch_defaults
from ..models.tokenizer import TextStream
from ..types import GENERATE_DOMAIN, SampleIdentity, SamplingParams, Trajectory
from .build import Session, resolve
from .degree import choose_generator_tp_by_memory
from .processes import GENERATING, Requests, gather_completions, join_processes
from .text.messages import RESERVED_WITH_TOOLS, Message, check_variables, normalize_chat, validate_tools
from .text.tool_calls import Tool
from .warm_up import make_ready, prepare_machine, warn_if_library_missing

T = TypeVar("T")
Prompt = str | list[dict[str, Any]] | list[int]  # plain text, chat messages for the model's template, or token ids


@dataclass(frozen=True)
class TextPiece:
    """New text of one sample of a prompt; its last piece brings the completion."""

    prompt: int
    sample: int
    text: str
    completion: Trajectory | None


class LLM(Session):
    """A language model in its compute dtype on its device, with its tokenizer and an engine that grows on demand.

    Steps run as captured graphs where `compile` says so. `close`, or leaving a `with` block, frees the graphs and the
    KV cache; a later call makes them anew. Under `torchrun` every process makes an `LLM` and calls the same methods
    with the same arguments; prompts are dealt to groups of `parallel.generator_tp` processes. `close` leaves the other
    processes, and a later call joins them again.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        seed: int = 0,
        config: GeneratorConfig | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        attention: Attention = "native",
        attention_mask: str | None = None,
        compile: CompileConfig | None = None,
        parallel: ParallelConfig | None = None,
    ) -> None:
        """Load a Hugging Face folder or hub id. `seed` is the default for sampling, `chat_template_kwargs` are passed
        to the chat template (`{"enable_thinking": False}`), attention, its mask and `compile` are as in `RunConfig` (by
        default CUDA graphs on a GPU, none on a CPU), and `parallel` may set `generator_tp` and `timeout`. Raises
        `InputError` if the model cannot be used or settings contradict each other."""
        compile = given_or_default("compile", compile, CompileConfig)
        parallel = given_or_default("parallel", parallel, ParallelConfig)
        check_generation(compile)
        check_layout(parallel, *GENERATION_LAYOUT_FIELDS)
        unresolved = validate(
            RunConfig(
                model=str(model),
                seed=seed,
                device=device,  # type: ignore[arg-type]
                dtype=dtype,  # type: ignore[arg-type]
                attention=attention,
                attention_mask=attention_mask,
                generator=given_or_default("config", config, GeneratorConfig),
                compile=compile,
                parallel=parallel,
            )
        )
        with ExitStack() as stack:
            world = stack.enter_context(join_processes(unresolved))
            unresolved, world = choose_generator_tp_by_memory(unresolved, world)
            super().__init__(world.run_on_all(lambda: resolve(unresolved, world.size, steps=False)), world=world)
            variables = {} if chat_template_kwargs is None else chat_template_kwargs
            self.policy.set_variables(variables, "chat_template_kwargs")
            warn_if_library_missing(self)
            prepare_machine(self)  # not checked: there is no trainer to compare with
            self._unresolved, self._joined, self._has_left = unresolved, stack.pop_all(), False
        self._engine: Engine | None = None
        self._capacity = (0, 0)  # the sequences, and tokens per sequence, that the engine was planned for
        # Kinds of sampling (truncated, greedy) that have graphs, and whether these read equal prefixes by group.
        self._warmed_up: dict[tuple[bool, bool], bool] = {}
        self._closed_stream: Callable[[], list[list[Trajectory]]] | None = None  # what it completed

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self._end_closed_stream()
        self._free()
        self._has_left = True
        self._joined.__exit__(*error)

    def close(self) -> None:
        """Free the engine, its graphs and its cache, and leave the other processes."""
        self.__exit__(None, None, None)

    def _free(self) -> None:
        had_engine = self._engine is not None
        self._engine, self._capacity = None, (0, 0)
        self._warmed_up.clear()
        if not self.runtime.eager:
            self.runtime.close()
            self.reset_runtime()
        if had_engine:
            gc.collect()  # programs and runtime form reference cycles, which hold the cache

    @property
    def context(self) -> int:
        """The most tokens a prompt and its completion may have together."""
        return self.policy.model.config.max_position_embeddings

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        seed: int | None = None,
    ) -> list[list[Trajectory]]:
        """The `sampling.n` completions of each prompt. `prompts` is a list, or one prompt: text, chat messages or token
        ids. `sampling` applies to all prompts, or is a list with one for each. Equal seeds give equal tokens, whatever
        else is in the batch; `seed` overrides the one given at construction. Raises `InputError` for sampling
        parameters out of range and for a prompt that is empty or does not fit the model's context, and `NonFiniteError`
        if a log-probability is not finite."""
        with self.join_processes():
            requests, engine = self._prepare(prompts, SamplingParams() if sampling is None else sampling, seed)
            own = requests.share(self.world)

            def completed() -> list[list[Trajectory]]:
                completions = engine.generate(*own)
                for prompt, samples in zip(self._own_prompts(len(requests.prompt_ids)), completions, strict=True):
                    for completion in samples:
                        require_finite_logprobs(prompt, completion)
                return completions

            with self.world.rolling_deadline(GENERATING) as engine.on_launch:
                return gather_completions(self.world, completed)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        seed: int | None = None,
    ) -> Generator[TextPiece, None, None]:
        """As `generate`, yielding text as it appears; all prompts run at once, so their pieces interleave. Samples of
        other groups of processes arrive at the end, as one piece each. The pieces of a sample concatenate to its
        completion's text. Closing the iterator stops the generation; others' streams then go on without its samples."""
        with self.join_processes():
            requests, engine = self._prepare(prompts, SamplingParams() if sampling is None else sampling, seed)
            own = self._own_prompts(len(requests.prompt_ids))
            completions: list[list[Trajectory]] = [[] for _ in own]
            failure: LockstepError | None = None

            def completed() -> list[list[Trajectory]]:
                if failure is not None:
                    raise failure
                return completions

            try:
                for piece in self._pieces(engine, requests.share(self.world)):
                    if piece.completion is not None:
                        completions[piece.prompt].append(piece.completion)
                    yield replace(piece, prompt=own[piece.prompt])
            except LockstepError as error:
                failure = error
            except GeneratorExit:
                self._closed_stream = completed
                raise
            for prompt, samples in enumerate(gather_completions(self.world, completed)):
                if prompt not in own:
                    for completion in samples:
                        yield TextPiece(prompt, completion.identity.sample, completion.text, completion)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        seed: int | None = None,
        tools: Callable[..., Any] | Sequence[Tool | Callable[..., Any]] = (),
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[list[Trajectory]]:
        """As `generate`, for one conversation or several in the format of OpenAI's API. The chat template is given
        `tools` (schemas, functions with type hints and a docstring, or one function) and `chat_template_kwargs` in
        addition to those of the constructor. `message` turns a completion into an answer with its tool calls."""
        conversations: dict[str, Any] = {"messages": messages}
        if isinstance(messages, (list, tuple)) and messages and not isinstance(messages[0], Mapping):
            conversations = {f"messages[{i}]": conversation for i, conversation in enumerate(messages)}
        variables = {} if chat_template_kwargs is None else chat_template_kwargs
        check_variables(self.policy.tokenizer.chat_template, variables, "chat_template_kwargs", RESERVED_WITH_TOOLS)
        schemas = _tool_schemas(tools)
        self.policy.tokens_with(schemas)  # raises if there are tools and the template has no known form of calls
        prompts = [
            self.policy.encode(normalize_chat(conversation, where), schemas, variables)
            for where, conversation in conversations.items()
        ]
        return self.generate(prompts, sampling, seed=seed)

    def message(
        self, completion: Trajectory, tools: Callable[..., Any] | Sequence[Tool | Callable[..., Any]] = ()
    ) -> Message:
        """The completion as a chat message, with `tool_calls` if it calls any of these tools."""
        return self.policy.tokens_with(_tool_schemas(tools)).parse_turn(completion.turns[-1]).message

    def _pieces(self, engine: Engine, requests: Requests) -> Iterator[TextPiece]:
        texts: dict[tuple[int, int], TextStream] = {}
        for prompt, sample, token_ids, completion in self._iterate_watched(engine.stream(*requests), engine):
            if completion is not None:
                require_finite_logprobs(completion.identity.group, completion)
            text = texts.setdefault((prompt, sample), TextStream(self.policy.decode))
            piece = text.feed(token_ids) if completion is None else text.finish(completion.text)
            if piece or completion is not None:
                yield TextPiece(prompt, sample, piece, completion)

    def _iterate_watched(self, items: Iterator[T], engine: Engine) -> Iterator[T]:
        """The same items. Deadlines for the other processes run while the engine works, not while the consumer does."""
        end = object()
        while True:
            with self.world.rolling_deadline(GENERATING) as engine.on_launch:
                item = next(items, end)
            if item is end:
                return
            yield item  # type: ignore[misc]

    @contextmanager
    def join_processes(self) -> Iterator[None]:
        """A context in which this process has joined the others, again if it had left them."""
        require_torch_defaults()
        if self._has_left:
            self.world = self._joined.enter_context(join_processes(self._unresolved))
            self._has_left = False
            if self.world.size > 1:  # the runtime makes graphs with the new world
                self.reset_runtime()
        with self.world.detect_lost_peers():
            self._end_closed_stream()
            yield

    def _end_closed_stream(self) -> None:
        """Exchange what a stream had completed when it was closed. Other processes wait for it at their stream's end;
        this one did not, as it may have been about to end."""
        completed, self._closed_stream = self._closed_stream, None
        if completed is not None:
            with self.world.detect_lost_peers():
                gather_completions(self.world, completed)

    def _prepare(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams], seed: int | None
    ) -> tuple[Requests, Engine]:
        """The requests, the same on every rank, and an engine that is ready for this rank's share of them."""
        requests = self.world.run_on_all(lambda: self._requests(prompts, sampling, seed))
        digest = hashlib.sha256(repr(requests).encode()).hexdigest
        self.world.require_same("the processes that generate", lambda: {"the hash of prompts and sampling": digest()})
        return requests, self.world.run_on_all(lambda: self.engine(requests.prompt_ids, requests.sampling))

    def _own_prompts(self, prompts: int) -> Sequence[int]:
        """The indices of the prompts that this rank's group completes."""
        return self.world.generator_mesh.fsdp.local_items(range(prompts))

    def engine(self, prompt_ids: list[list[int]], sampling: list[SamplingParams]) -> Engine:
        """An engine whose cache is planned for a rank's share of these requests (`engine_for`)."""
        lengths = [len(ids) + s.max_completion_length for ids, s in zip(prompt_ids, sampling, strict=True)]
        prompts = self.world.generator_mesh.fsdp.max_local_items(len(sampling))
        sequences = sum(sorted((params.n for params in sampling), reverse=True)[:prompts])
        engine = self._engine_with_room(sequences, max(lengths))
        for i, (ids, params) in enumerate(zip(prompt_ids, sampling, strict=True)):
            engine.require_runnable(ids, params, i)
        return self._with_graphs(engine, sampling)

    def engine_for(self, sequences: int, tokens: int, kinds: Sequence[SamplingParams] = ()) -> Engine:
        """An engine with room for `sequences` at once, of `tokens` each, prompt included. The current engine, with its
        cached prefixes, is reused if it has that room. Room is planned in powers of two, up to a given capacity of the
        cache, so that it seldom grows and stored graphs can be reused; graphs are made for that room and these kinds of
        sampling. Later requests get the same bits as from `generate`. Raises `InputError` while a stream is open."""
        return self._with_graphs(self._engine_with_room(sequences, tokens), kinds)

    def _engine_with_room(self, sequences: int, tokens: int) -> Engine:
        if self._engine is not None and self._engine.scheduler.busy:
            raise InputError("a stream of this model is still open; read it to its end or close it first")
        if self._engine is None or sequences > self._capacity[0] or tokens > self._capacity[1]:
            sequences = max(_power_of_two(sequences), self._capacity[0])
            g, room = self.config.generator, max(_power_of_two(tokens), self._capacity[1])
            if g.kv_cache_tokens:  # its whole pages hold no more
                room = max(tokens, min(room, g.kv_cache_tokens // g.page_size * g.page_size))
            self._free()  # the old cache, before the new one is planned
            cache_tokens = self.cache_tokens(sequences, min(room, self.context))  # the engine refuses what exceeds that
            self._engine, self._capacity = self.new_engine(cache_tokens), (sequences, room)
        return self._engine

    def _with_graphs(self, engine: Engine, kinds: Sequence[SamplingParams]) -> Engine:
        """Make the engine's graphs for these kinds of sampling. A mix of kinds, or more tokens at once than in any
        request so far, is captured when it first occurs."""
        sequences, tokens = self._capacity[0], min(self._capacity[1], self.context)
        for params in kinds if self.runtime.compiles else ():
            kind = params.truncated, params.temperature == 0
            grouped = pays_to_group(sequences, tokens, params.n, engine.cache.kv_heads)
            if kind not in self._warmed_up or (grouped and not self._warmed_up[kind]):
                make_graphs = partial(engine.warm_up, sequences, tokens, params)
                about = self.config.generator, self.config.compile, self._capacity, params.n, kind
                make_ready(self, [make_graphs], engine.check_cases, self.kernel_list(*about))
                self._warmed_up[kind] = grouped
        return engine

    def _requests(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams], seed: int | None
    ) -> Requests:
        if seed is None:
            seed = self.config.seed
        check_range("seed", seed, 0, MAX_SEED, whole=True)
        if not isinstance(prompts, (str, Sequence)):
            raise InputError(f"the prompts are of type {type(prompts).__name__}; give text, chat messages, or a list")
        prompt_list = as_prompt_list(prompts)
        refuse(not prompt_list, "there is no prompt; give at least one")
        ids = [self._encode(i, prompt) for i, prompt in enumerate(prompt_list)]
        identities = [SampleIdentity(seed, GENERATE_DOMAIN, 0, group) for group in range(len(ids))]
        params_list = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(ids)
        for params in params_list:
            check_sampling(params)
        refuse(
            len(params_list) != len(ids),
            f"there are {len(ids)} prompts and {len(params_list)} sampling parameters; give one each",
        )
        return Requests(ids, params_list, identities)

    def _encode(self, index: int, prompt: Prompt) -> list[int]:
        parts: list[Any] = prompt if isinstance(prompt, list) else []
        if parts and all(type(part) is int for part in parts):
            return parts
        if not isinstance(prompt, str) and not (parts and all(isinstance(part, dict) for part in parts)):
            raise InputError(f"prompt {index + 1} is {prompt!r:.40}; it must be text, chat messages, or token ids")
        given = prompt if isinstance(prompt, str) else checked_messages(parts, f"prompt {index + 1}")
        try:
            return self.policy.encode(given)
        except InputError as error:
            raise InputError(f"prompt {index + 1}: {error}") from error


def _tool_schemas(tools: Callable[..., Any] | Sequence[Tool | Callable[..., Any]]) -> list[Tool]:
    listed = tools if isinstance(tools, Iterable) else [tools]
    return validate_tools([tool_schema(tool, "tools") if callable(tool) else tool for tool in listed])


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def require_finite_logprobs(prompt: int, completion: Trajectory) -> None:
    """Raise `NonFiniteError` naming the first token whose log-probability is NaN or infinite."""
    for token, (sampled, own) in enumerate(zip(completion.logprobs, completion.model_logprobs, strict=True)):
        if not (isfinite(sampled) and isfinite(own)):
            value = sampled if isfinite(own) else own
            raise NonFiniteError(
                f"prompt {prompt + 1}, sample {completion.identity.sample + 1}: token {token + 1} has the "
                f"log-probability {value}, which is no finite number: the model's outputs overflow in this dtype"
            )


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """A list of prompts; one prompt (text, messages or token ids) becomes a list of one."""
    is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (dict, int)))
    return [prompts] if is_one else list(prompts)


def check_sampling(sampling: SamplingParams) -> None:
    """Raise `InputError` naming the first parameter that is out of range, or if `sampling` is of another type."""
    if not isinstance(sampling, SamplingParams):
        kind = type(sampling).__name__
        raise InputError(f"sampling is of type {kind}; it must be SamplingParams, or a list with one for each prompt")
    shared = {name: value for name, value in vars(sampling).items() if name not in ("n", "stop_token_ids")}
    SamplingConfig(**shared).validate()
    check_range("sampling.n", sampling.n, 1, 1 << 16, whole=True)
    ids = sampling.stop_token_ids
    are_ids = isinstance(ids, (list, tuple)) and all(type(token) is int for token in ids)
    refuse(not are_ids, f"sampling.stop_token_ids is {ids!r:.40}; it must be a list of token ids")
