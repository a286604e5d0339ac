"""TRL's `rollout_func` (TRL 1.16, experimental there): a function of all prompts and the trainer, which returns their
completions: `prompt_ids`, `completion_ids`, `logprobs`, perhaps `env_mask`, and further fields for reward functions.

What it asks its trainer to generate is sampled by this run's engine. What it returns is split again into sampled turns,
which are compared and trained on, and tokens that were given between them.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

from ...errors import InputError, LockstepError, PromptTooLong, refuse
from ...json_file import to_plain
from ...types import SampleIdentity, SamplingParams, Segment, Trajectory
from ...user_functions import one_line
from ..codec import ChatCodec
from ..environment import End, Environment
from ..episodes import Episode, EpisodeContext, GroupRequest, Sampler

RolloutFunc = Callable[[list[Any], Any], Mapping[str, Any]]
_NEEDED = ("prompt_ids", "completion_ids", "logprobs")
_LISTS = (*_NEEDED, "env_mask")  # one entry for each prompt; the last two may be None
_OTHERS = 0xFFFF  # marks keys of prompts that are no sample's, in the place of a branch's number


@dataclass(eq=False)
class _SampledTurn:
    """A turn that the engine sampled."""

    prompt_ids: list[int]
    turn: Segment
    trajectory: Trajectory
    used: bool = False

    def matches(self, prompt: list[int], rest: list[int]) -> bool:
        """Whether the prompt and the completion begin with this turn's tokens, and the turn is not used yet."""
        own, sampled = self.prompt_ids, self.turn.token_ids
        return not self.used and prompt[: len(own)] == own and rest[: len(sampled)] == sampled


class TrlGeneration:
    """What a function's trainer generates with: the methods of TRL's `vllm_generation` and its `vllm_client`.

    The random key of a turn follows from the tokens before it, so that neither other prompts nor the order of calls
    matter. If these tokens begin with a sample's prompt and what was sampled after it, the turn continues that sample;
    if they are a prompt, it begins the prompt's first sample that has not begun. Otherwise, the key is made of the
    tokens, of how often they were asked for before, and of a sample: in a call with as many prompts as there are
    samples, the one at the same index; else the first of this process.
    """

    def __init__(
        self, runner: RolloutFuncRunner, sampling: SamplingParams, identities: dict[SampleIdentity, list[int]]
    ) -> None:
        """`identities`: the samples' identities, each with the tokens of its prompt."""
        self._runner, self._sampling = runner, sampling
        self._samples = list(identities)
        self._not_begun: dict[tuple[int, ...], list[SampleIdentity]] = {}  # by prompt
        for identity, prompt in identities.items():
            self._not_begun.setdefault(tuple(prompt), []).append(identity)
        self._begun: dict[tuple[int, ...], list[SampleIdentity]] = {}  # by all tokens up to the last sampled
        self._other_keys: Counter[tuple[tuple[int, ...], SampleIdentity]] = Counter()
        self.turns: list[_SampledTurn] = []
        self.vllm_client = SimpleNamespace(generate=self._client_generate, chat=self._client_chat)

    def generate(
        self, prompts: list[list[int]], images: Any = None, num_generations: int = 1, profiler: Any = None
    ) -> tuple[Any, ...]:
        """As `VLLMGeneration.generate`: `prompts` has a prompt's token ids once for each of its completions."""
        refuse(bool(images), "rollout_func asked for images; prompts are text here")
        return prompts, *self._complete(prompts, self._sampling.max_completion_length)

    def single_turn(
        self, prompt_ids: list[list[int]], images: Any = None, multimodal_fields: Any = None, num_generations: int = 1
    ) -> tuple[list[list[int]], list[list[float]]]:
        """As `GRPOTrainer._generate_single_turn`: completions and the log-probabilities of their tokens."""
        _, completion_ids, logprobs, _ = self.generate(prompt_ids, images, num_generations)
        return completion_ids, [[logprob for (logprob,) in of_turn] for of_turn in logprobs]

    def sync_weights(self) -> None:
        """Do nothing: the engine reads the trainer's weights."""

    def _client_generate(
        self, prompts: list[Any], features: Any = None, n: int = 1, max_tokens: int = 16, **sampling: Any
    ) -> dict[str, Any]:
        codec = self._runner.codec
        ids = [codec.encode_prompt(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
        return self._answer_client(ids, n, max_tokens, {**sampling, "features": features})

    def _client_chat(
        self, messages: list[Any], n: int = 1, max_tokens: int = 16, tools: Any = None, **sampling: Any
    ) -> dict[str, Any]:
        codec = self._runner.codec
        if tools and codec.with_tools is not None:
            codec = codec.with_tools(tools)
        return self._answer_client([codec.encode_prompt(chat) for chat in messages], n, max_tokens, sampling)

    def _answer_client(self, ids: list[list[int]], n: int, max_tokens: int, sampling: dict[str, Any]) -> dict[str, Any]:
        sampling.pop("max_concurrent_requests", None)
        for name, default in {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}.items():
            given, value = sampling.pop(name, default), getattr(self._sampling, name)
            if (max(given, 0) if name == "top_k" else given) != value:
                raise InputError(
                    f"rollout_func asked for {name} {given}; the run samples with {value}: pass trainer.{name}"
                )
        neutral = {"repetition_penalty": (1, 1.0), "logprobs": (0, 1, None)}
        for name, value in sampling.items():
            if value and value not in neutral.get(name, ()):
                raise InputError(f"rollout_func asked for {name} {one_line(value, repr)}, which is not supported")
        completion_ids, logprobs, token_ids = self._complete([one for one in ids for _ in range(n)], max_tokens)
        return {
            "prompt_ids": ids,
            "completion_ids": completion_ids,
            "logprobs": logprobs,
            "logprob_token_ids": token_ids,
        }

    def _complete(self, prompts: list[list[int]], max_tokens: int) -> tuple[list[Any], list[Any], list[Any]]:
        """Sample a turn after each prompt. Returns, in order, their tokens and, in a list for each token, its
        log-probability and its id."""
        max_tokens = min(max_tokens, self._sampling.max_completion_length)
        sampling = replace(self._sampling, n=1, max_completion_length=max_tokens)
        samples = self._samples if len(prompts) == len(self._samples) else self._samples[:1] * len(prompts)
        keys = [self._take_key(tuple(ids), sample) for ids, sample in zip(prompts, samples, strict=True)]
        trajectories = self._runner.complete(prompts, sampling, keys)
        turns = [trajectory.segments[-1] for trajectory in trajectories]
        for ids, key, turn, trajectory in zip(prompts, keys, turns, trajectories, strict=True):
            self.turns.append(_SampledTurn(list(ids), turn, trajectory))
            self._begun.setdefault((*ids, *turn.token_ids), []).append(key)
        logprobs = [[[value] for value in turn.logprobs or ()] for turn in turns]
        return [list(turn.token_ids) for turn in turns], logprobs, [[[t] for t in turn.token_ids] for turn in turns]

    def _take_key(self, ids: tuple[int, ...], sample: SampleIdentity) -> SampleIdentity:
        """The key of the turn after these tokens; `sample` is part of it if the turn belongs to none."""
        source, tokens = self._not_begun, ids
        for length in sorted({len(begun) for begun in self._begun if len(begun) <= len(ids)}, reverse=True):
            if ids[:length] in self._begun:
                source, tokens = self._begun, ids[:length]
                break
        if tokens in source:
            key = source[tokens].pop(0)
            if not source[tokens]:
                del source[tokens]
            return key
        number = self._other_keys[ids, sample]
        self._other_keys[ids, sample] += 1
        digest = hashlib.blake2b(repr((ids, sample.group, sample.sample)).encode(), digest_size=4).digest()
        domain = sample.domain + (_OTHERS << 8)  # a key that no sample has
        return replace(sample, domain=domain, group=int.from_bytes(digest), sample=number)


class RolloutFuncRunner:
    """One round, in place of `EpisodeRunner`: calls the function once, in the caller's thread."""

    def __init__(self, context: EpisodeContext) -> None:
        self._environment, self.codec, self._limits = context.environment, context.codec, context.limits
        self._make_sampler, self._timings = context.make_sampler, context.timings
        self._function: RolloutFunc = context.environment.function  # type: ignore[attr-defined]
        self._sampler: Sampler | None = None
        self.sampled_tokens = 0

    def run(
        self, requests: Sequence[GroupRequest], sampling: SamplingParams, identity: SampleIdentity
    ) -> list[list[Episode]]:
        """As `EpisodeRunner.run`. The first prompt has additional episodes, without an end and numbered after its
        samples: turns that were sampled but not returned, which are only compared. `LockstepError`: the function fails.
        `InputError`: it asks for or returns something invalid."""
        samples = range(identity.sample, identity.sample + sampling.n)
        prompts: list[Any] = []
        prompt_ids: dict[SampleIdentity, list[int]] = {}
        for request in requests:
            ids = self._encode_prompt(request)
            for sample in samples:
                prompts.append(request.problem.prompt)
                prompt_ids[replace(identity, group=request.group, sample=sample)] = ids
        generation, keys = TrlGeneration(self, sampling, prompt_ids), list(prompt_ids)
        returned = self._call_function(prompts, _trainer(generation, self.codec, sampling, identity))
        columns = {name: values for name, values in returned.items() if name not in _LISTS}
        for name, values in columns.items():
            if isinstance(values, list) and len(values) != len(keys):
                raise InputError(
                    f"rollout_func returned {len(values)} values of {name} for {len(keys)} prompts; give one each"
                )
        groups: list[list[Episode]] = [[] for _ in requests]
        for i, key in enumerate(keys):
            where = f"{requests[i // sampling.n].where} sample {key.sample}"
            trajectory = _with_identity(self._trajectory(returned, i, generation.turns, where), key)
            episode = Episode(self._environment(), key.group, key.sample, self.codec, trajectory, prompts[i])
            own_columns = {name: value[i] if isinstance(value, list) else value for name, value in columns.items()}
            episode.end = End(columns=own_columns)
            groups[i // sampling.n].append(episode)
        unused = (turn for turn in generation.turns if not turn.used)
        for number, turn in enumerate(unused, start=samples.stop):
            trajectory = _with_identity(turn.trajectory, replace(keys[0], sample=number))
            groups[0].append(Episode(self._environment(), keys[0].group, number, self.codec, trajectory))
        return groups

    def _encode_prompt(self, request: GroupRequest) -> list[int]:
        """The tokens of the row's prompt; empty if it is too long for any turn to follow, as it need not be used."""
        try:
            return self.codec.encode_prompt(request.problem.prompt)
        except PromptTooLong:
            return []
        except InputError as error:
            raise InputError(f"{request.where}: {error}") from error

    def close(self) -> None:
        """Do nothing: no environments are held."""

    def complete(
        self, prompts: list[list[int]], sampling: SamplingParams, keys: list[SampleIdentity]
    ) -> list[Trajectory]:
        """Sample a turn after each prompt, all at once."""
        prompt_limit = self._limits.prompt_tokens
        longest = (prompt_limit or 0) + (self._limits.response_tokens or 0)
        for ids in prompts:
            if not ids or (prompt_limit is not None and len(ids) > longest):
                raise InputError(
                    f"rollout_func asked for a turn after {len(ids)} tokens; the run allows 1 to {longest}"
                )
        if self._sampler is None:
            self._sampler = self._make_sampler(prompts, [sampling] * len(prompts))
        requests = [self._sampler.add_request(ids, sampling, key) for ids, key in zip(prompts, keys, strict=True)]
        completions: dict[int, Trajectory] = {}
        while len(completions) < len(requests):
            for output in self._sampler.advance():
                if output.completion is not None:
                    completions[output.request_id] = output.completion
                    self.sampled_tokens += len(output.completion.token_ids)
        return [completions[request] for request in requests]

    def _call_function(self, prompts: list[Any], trainer: Any) -> Mapping[str, Any]:
        """What the function returns, checked."""
        name = getattr(self._function, "__name__", "rollout_func")
        try:
            with self._timings.measure("environment"):
                returned = self._function(prompts, trainer)
        except LockstepError:
            raise
        except (Exception, SystemExit) as error:
            raise LockstepError(f"{name} raised {type(error).__name__}: {one_line(error)}") from error
        missing = [field for field in _NEEDED if not isinstance(returned, Mapping) or field not in returned]
        if missing:
            raise InputError(f"{name} must return a dict with {', '.join(_NEEDED)}; there is no {missing[0]}")
        misnamed = [field for field in returned if not isinstance(field, str) or field in ("prompts", "completions")]
        if misnamed:
            raise InputError(
                f"{name} returned a field {misnamed[0]!r}; name it by a text, and not as a reward argument"
            )
        lists = {field: _list_per_prompt(returned.get(field), len(prompts), name, field) for field in _LISTS}
        return {**returned, **lists}

    def _join_as_branches(self, turns: list[_SampledTurn], where: str) -> Trajectory:
        """The trajectory of turns with separate prompts, each a branch."""
        segments: list[Segment] = []
        for turn in turns:
            turn.used = True
            segments += [Segment(turn.prompt_ids, begins_branch=bool(segments)), turn.turn]
        rows, limit = sum(len(s.token_ids) for s in segments) - len(turns), self._limits.packed_tokens
        if limit is not None and rows > limit:
            raise InputError(
                f"{where}: the turns that rollout_func joined take {rows} tokens; {limit} fit a micro-batch"
            )
        return Trajectory(segments, turns[-1].trajectory.finish_reason)

    def _trajectory(self, returned: Mapping[str, Any], i: int, turns: list[_SampledTurn], where: str) -> Trajectory:
        """Completion `i` as a trajectory: what was given, and the turns that were sampled."""
        prompt, rest = list(returned["prompt_ids"][i]), list(returned["completion_ids"][i])
        mask = returned["env_mask"] and returned["env_mask"][i]
        logprobs = returned["logprobs"] and returned["logprobs"][i]
        for name, values in (("env_mask", mask), ("logprobs", logprobs)):
            if values and len(values) != len(rest):
                raise InputError(f"{where}: rollout_func returned {len(values)} {name} for {len(rest)} tokens")
        if joined := _turns_joined(turns, prompt, rest):
            return self._join_as_branches(joined, where)
        segments, place, last = [Segment(prompt)], 0, None
        while place < len(rest):
            if mask and not mask[place]:
                end = next((p for p in range(place, len(rest)) if mask[p]), len(rest))
                segments.append(Segment(rest[place:end], text=self.codec.decode(rest[place:end])))
                place = end
                continue
            before, after = prompt + rest[:place], rest[place:]
            matching = (t for t in turns if len(t.prompt_ids) == len(before) and t.matches(before, after))
            last = next(matching, None)
            if last is None:
                raise InputError(
                    f"{where}: token {place + 1} of the completion that rollout_func returned was not sampled by this "
                    "run after the tokens before it; return each turn with the very tokens that it was sampled after, "
                    "and mark what was given between turns as 0 in env_mask"
                )
            last.used = True
            segments.append(last.turn)
            place += len(last.turn.token_ids)
        if last is None:
            raise InputError(f"{where}: rollout_func returned nothing that was sampled")
        if self._limits.response_tokens is not None and len(rest) > self._limits.response_tokens:
            raise InputError(
                f"{where}: rollout_func returned {len(rest)} tokens; {self._limits.response_tokens} are allowed"
            )
        return Trajectory(segments, last.trajectory.finish_reason)


def _list_per_prompt(values: Any, count: int, function: str, field: str) -> Any:
    """A returned field with an entry per prompt, tensors and arrays as lists. `InputError` for anything else."""
    values, ids = to_plain(values), field in ("prompt_ids", "completion_ids")
    if values is None and not ids:
        return None
    lists = isinstance(values, list) and all(isinstance(one, list) or (one is None and not ids) for one in values)
    if not lists or (ids and any(type(token) is not int for one in values for token in one)):
        kind = "token ids" if ids else "numbers"
        returned = f"{function} returned {field} {one_line(values, repr)}"
        raise InputError(f"{returned}; they must be a list of {kind} for each prompt")
    if len(values) != count:
        raise InputError(f"{function} returned {len(values)} {field} for {count} prompts; give one each")
    return values


def _with_identity(trajectory: Trajectory, key: SampleIdentity) -> Trajectory:
    """A trajectory with the identity and name that it is recorded by, which are unique, whatever keyed its tokens."""
    trajectory.identity, trajectory.name = key, f"group {key.group} sample {key.sample}"
    return trajectory


def _turns_joined(turns: list[_SampledTurn], prompt: list[int], rest: list[int]) -> list[_SampledTurn]:
    """The turns, each with a separate prompt, whose concatenated prompts are `prompt` and whose concatenated
    completions are `rest`; none if there are not at least two."""
    joined: list[_SampledTurn] = []
    while prompt or rest:
        turn = next((t for t in turns if t not in joined and t.matches(prompt, rest)), None)
        if turn is None:
            return []
        joined.append(turn)
        prompt, rest = prompt[len(turn.prompt_ids) :], rest[len(turn.turn.token_ids) :]
    return joined if len(joined) > 1 else []


def _trainer(generation: TrlGeneration, codec: ChatCodec, sampling: SamplingParams, identity: SampleIdentity) -> Any:
    """What a function is given as its trainer: sampling parameters, tokenizer and generation."""
    parameters = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    parameters |= {"repetition_penalty": 1.0, "max_completion_length": sampling.max_completion_length}
    return SimpleNamespace(
        **parameters,
        args=SimpleNamespace(**parameters, num_generations=sampling.n, generation_kwargs=None, report_to=[]),
        state=SimpleNamespace(global_step=identity.step),
        accelerator=SimpleNamespace(process_index=0, num_processes=1, is_main_process=True, device="cpu"),
        use_vllm=True,
        vllm_mode="server",
        vllm_generation=generation,
        tools=None,
        chat_template=None,
        chat_template_kwargs={},
        num_generations=sampling.n,
        num_generations_eval=sampling.n,
        processing_class=codec.tokenizer,
        _tokenizer=codec.tokenizer,
        _tokenize_prompts=lambda prompts: ([codec.encode_prompt(prompt) for prompt in prompts], None, {}),
        _generate_single_turn=generation.single_turn,
    )


class RolloutEnvironment(Environment):
    """One of the completions that `function` returns."""

    plays = RolloutFuncRunner
    function: ClassVar[RolloutFunc]


def is_rollout_func(kind: Any) -> bool:
    """Whether `kind` is called with two arguments, the prompts and the trainer; a factory is called with none."""
    if isinstance(kind, type) or not callable(kind):
        return False
    try:
        inspect.signature(kind).bind([], None)
    except (TypeError, ValueError):
        return False
    parameters = inspect.signature(kind).parameters.values()
    return sum(p.default is p.empty and p.kind < p.VAR_POSITIONAL for p in parameters) == 2


def rollout_environment(function: RolloutFunc) -> type[RolloutEnvironment]:
    """An environment whose completions `function` returns."""
    return type("Rollouts", (RolloutEnvironment,), {"function": staticmethod(function)})
