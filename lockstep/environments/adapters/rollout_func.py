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

from ...errors import InputError, LockstepError, refuse
from ...json_file import to_plain
from ...types import SampleIdentity, SamplingParams, Segment, Trajectory
from ...user_functions import one_line
from ..environment import End, Environment
from ..episodes import Asked, Episode, Round, Sampler
from ..tokens import Tokens

RolloutFunc = Callable[[list[Any], Any], Mapping[str, Any]]
_NEEDED = ("prompt_ids", "completion_ids", "logprobs")
_LISTS = (*_NEEDED, "env_mask")  # one entry for each prompt; the last two may be None
_OTHERS = 0xFFFF  # marks keys of prompts that are no sample's, in the place of a branch's number


@dataclass(eq=False)
class _Drawn:
    """A turn that the engine sampled."""

    prompt_ids: list[int]
    turn: Segment
    trajectory: Trajectory
    used: bool = False

    def begins(self, prompt: list[int], rest: list[int]) -> bool:
        """Whether the prompt and the completion begin with this turn's tokens, and the turn is not used yet."""
        own, said = self.prompt_ids, self.turn.token_ids
        return not self.used and prompt[: len(own)] == own and rest[: len(said)] == said


class Generation:
    """What a function's trainer generates with: the methods of TRL's `vllm_generation` and its `vllm_client`.

    The random key of a turn follows from the tokens before it, so that neither other prompts nor the order of calls
    matter. If these tokens begin with a sample's prompt and what was drawn after it, the turn continues that sample; if
    they are a prompt, it begins the prompt's first sample that has not begun. Otherwise, the key is made of the tokens,
    of how often they were asked for before, and of a sample: in a call with as many prompts as there are samples, the
    one at the same index; else the first of this process.
    """

    def __init__(
        self, play: RolloutPlay, sampling: SamplingParams, identities: dict[SampleIdentity, list[int]]
    ) -> None:
        """`identities`: the samples' identities, each with the tokens of its prompt."""
        self._play, self._sampling = play, sampling
        self._samples = list(identities)
        self._to_begin: dict[tuple[int, ...], list[SampleIdentity]] = {}
        for identity, prompt in identities.items():
            self._to_begin.setdefault(tuple(prompt), []).append(identity)
        self._to_go_on: dict[tuple[int, ...], list[SampleIdentity]] = {}  # by all tokens up to the last drawn
        self._others: Counter[tuple[tuple[int, ...], SampleIdentity]] = Counter()
        self.drawn: list[_Drawn] = []
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
        return completion_ids, [[value for (value,) in of_one] for of_one in logprobs]

    def sync_weights(self) -> None:
        """Do nothing: the engine reads the trainer's weights."""

    def _client_generate(
        self, prompts: list[Any], features: Any = None, n: int = 1, max_tokens: int = 16, **sampling: Any
    ) -> dict[str, Any]:
        tokens = self._play.tokens
        ids = [tokens.prompt(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
        return self._client(ids, n, max_tokens, {**sampling, "features": features})

    def _client_chat(
        self, messages: list[Any], n: int = 1, max_tokens: int = 16, tools: Any = None, **sampling: Any
    ) -> dict[str, Any]:
        tokens = self._play.tokens
        if tools and tokens.with_tools is not None:
            tokens = tokens.with_tools(tools)
        return self._client([tokens.prompt(chat) for chat in messages], n, max_tokens, sampling)

    def _client(self, ids: list[list[int]], n: int, max_tokens: int, sampling: dict[str, Any]) -> dict[str, Any]:
        sampling.pop("max_concurrent_requests", None)
        for name, usual in {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}.items():
            given, value = sampling.pop(name, usual), getattr(self._sampling, name)
            if (max(given, 0) if name == "top_k" else given) != value:
                raise InputError(
                    f"rollout_func asked for {name} {given}; the run samples with {value}: pass trainer.{name}"
                )
        neutral = {"repetition_penalty": (1, 1.0), "logprobs": (0, 1, None)}
        for name, value in sampling.items():
            if value and value not in neutral.get(name, ()):
                raise InputError(f"rollout_func asked for {name} {one_line(value, repr)}, which is not supported")
        found = self._complete([one for one in ids for _ in range(n)], max_tokens)
        return dict(zip(("prompt_ids", "completion_ids", "logprobs", "logprob_token_ids"), (ids, *found), strict=True))

    def _complete(self, prompts: list[list[int]], max_tokens: int) -> tuple[list[Any], list[Any], list[Any]]:
        """Sample a turn after each prompt. Returns, in order, their tokens and, in a list for each token, its
        log-probability and its id."""
        most = min(max_tokens, self._sampling.max_completion_length)
        sampling = replace(self._sampling, n=1, max_completion_length=most)
        beside = self._samples if len(prompts) == len(self._samples) else self._samples[:1] * len(prompts)
        keys = [self._key(tuple(ids), sample) for ids, sample in zip(prompts, beside, strict=True)]
        made = self._play.complete(prompts, sampling, keys)
        drawn = [_Drawn(list(ids), one.segments[-1], one) for ids, one in zip(prompts, made, strict=True)]
        for key, one in zip(keys, drawn, strict=True):
            self._to_go_on.setdefault((*one.prompt_ids, *one.turn.token_ids), []).append(key)
        self.drawn += drawn
        turns = [one.turn for one in drawn]
        logprobs = [[[value] for value in turn.logprobs or ()] for turn in turns]
        return [list(turn.token_ids) for turn in turns], logprobs, [[[t] for t in turn.token_ids] for turn in turns]

    def _key(self, ids: tuple[int, ...], beside: SampleIdentity) -> SampleIdentity:
        lengths = sorted({length for length in map(len, self._to_go_on) if length <= len(ids)}, reverse=True)
        begun = next((part for length in lengths if (part := ids[:length]) in self._to_go_on), None)
        source, part = (self._to_begin, ids) if begun is None else (self._to_go_on, begun)
        if part in source:
            key = source[part].pop(0)
            if not source[part]:
                del source[part]
            return key
        self._others[ids, beside] += 1
        words = hashlib.blake2b(repr((ids, beside.group, beside.sample)).encode(), digest_size=4).digest()
        domain, number = beside.domain + (_OTHERS << 8), self._others[ids, beside] - 1  # a key that no sample has
        return replace(beside, domain=domain, group=int.from_bytes(words), sample=number)


class RolloutPlay:
    """One round, in place of `Play`: calls the function once, in the caller's thread."""

    def __init__(self, by: Round) -> None:
        self._environment, self.tokens, self._sampler_of, self._limits, _, self._timings, _ = by
        self._function: RolloutFunc = by.environment.function  # type: ignore[attr-defined]
        self._sampler: Sampler | None = None
        self.sampled_tokens = 0

    def run(self, asked: Sequence[Asked], sampling: SamplingParams, identity: SampleIdentity) -> list[list[Episode]]:
        """As `Play.run`. The first prompt has additional episodes, without an end and numbered after its samples: turns
        that were drawn but not returned, which are only compared. `LockstepError`: the function fails. `InputError`:
        it asks for or returns something invalid."""
        samples = range(identity.sample, identity.sample + sampling.n)
        keys = [replace(identity, group=a.group, sample=s) for a in asked for s in samples]
        prompts = [a.problem.prompt for a in asked for _ in samples]
        begins = [ids for a in asked for ids in [self._prompt(a)] * sampling.n]
        generation = Generation(self, sampling, dict(zip(keys, begins, strict=True)))
        found = self._called(prompts, _trainer(generation, self.tokens, sampling, identity))
        columns = {name: values for name, values in found.items() if name not in _LISTS}
        for name, values in columns.items():
            if isinstance(values, list) and len(values) != len(keys):
                raise InputError(
                    f"rollout_func returned {len(values)} values of {name} for {len(keys)} prompts; give one each"
                )
        episodes = []
        for i, key in enumerate(keys):
            a = asked[i // sampling.n]
            where = f"{a.where} sample {key.sample}"
            trajectory = _numbered(self._trajectory(found, i, generation.drawn, where), key)
            own = {name: v[i] if isinstance(v, list) else v for name, v in columns.items()}
            episode = Episode(self._environment(), key.group, key.sample, self.tokens, trajectory, a.problem.prompt)
            episode.end = End(columns=own)
            episodes.append(episode)
        groups = [episodes[i * sampling.n : (i + 1) * sampling.n] for i in range(len(asked))]
        for number, one in enumerate((one for one in generation.drawn if not one.used), samples.stop):
            trajectory = _numbered(one.trajectory, replace(keys[0], sample=number))
            groups[0].append(Episode(self._environment(), asked[0].group, number, self.tokens, trajectory))
        return groups

    def _prompt(self, asked: Asked) -> list[int]:
        try:
            return self.tokens.prompt(asked.problem.prompt)
        except InputError as error:
            raise InputError(f"{asked.where}: {error}") from error

    def close(self) -> None:
        """Do nothing: no environments are held."""

    def complete(
        self, prompts: list[list[int]], sampling: SamplingParams, keys: list[SampleIdentity]
    ) -> list[Trajectory]:
        """Sample a turn after each prompt, all at once."""
        most = self._limits.prompt_tokens
        longest = (most or 0) + (self._limits.response_tokens or 0)
        for ids in prompts:
            if not ids or (most is not None and len(ids) > longest):
                raise InputError(
                    f"rollout_func asked for a turn after {len(ids)} tokens; the run allows 1 to {longest}"
                )
        if self._sampler is None:
            self._sampler = self._sampler_of(prompts, [sampling] * len(prompts))
        requests = [self._sampler.add_request(ids, sampling, key) for ids, key in zip(prompts, keys, strict=True)]
        found: dict[int, Trajectory] = {}
        while len(found) < len(requests):
            for grown in self._sampler.advance():
                if grown.completion is not None:
                    found[grown.request_id] = grown.completion
                    self.sampled_tokens += len(grown.completion.token_ids)
        return [found[request] for request in requests]

    def _called(self, prompts: list[Any], trainer: Any) -> Mapping[str, Any]:
        name = getattr(self._function, "__name__", "rollout_func")
        try:
            with self._timings.measure("environment"):
                found = self._function(prompts, trainer)
        except LockstepError:
            raise
        except (Exception, SystemExit) as error:
            raise LockstepError(f"{name} raised {type(error).__name__}: {one_line(error)}") from error
        missing = [field for field in _NEEDED if not isinstance(found, Mapping) or field not in found]
        if missing:
            raise InputError(f"{name} must return a dict with {', '.join(_NEEDED)}; there is no {missing[0]}")
        unnamed = [field for field in found if not isinstance(field, str) or field in ("prompts", "completions")]
        if unnamed:
            raise InputError(f"{name} returned a field {unnamed[0]!r}; name it by a text, and not as a reward argument")
        of_each = {field: _of_each(found.get(field), len(prompts), f"{name} returned", field) for field in _LISTS}
        return {**found, **of_each}

    def _branches(self, turns: list[_Drawn], where: str) -> Trajectory:
        """The trajectory of turns with separate prompts, each a branch."""
        segments: list[Segment] = []
        for one in turns:
            one.used = True
            segments += [Segment(one.prompt_ids, begins_branch=bool(segments)), one.turn]
        rows, most = sum(len(s.token_ids) for s in segments) - len(turns), self._limits.packed_tokens
        if most is not None and rows > most:
            raise InputError(
                f"{where}: the turns that rollout_func joined take {rows} tokens; {most} fit a micro-batch"
            )
        return Trajectory(segments, turns[-1].trajectory.finish_reason)

    def _trajectory(self, found: Mapping[str, Any], i: int, drawn: list[_Drawn], where: str) -> Trajectory:
        """Completion `i` as a trajectory: what was given, and the turns that were drawn."""
        prompt, rest = list(found["prompt_ids"][i]), list(found["completion_ids"][i])
        mask, logprobs = found["env_mask"] and found["env_mask"][i], found["logprobs"]
        for name, values in (("env_mask", mask), ("logprobs", logprobs and logprobs[i])):
            if values and len(values) != len(rest):
                raise InputError(f"{where}: rollout_func returned {len(values)} {name} for {len(rest)} tokens")
        if turns := _joined(drawn, prompt, rest):
            return self._branches(turns, where)
        segments, place, last = [Segment(prompt)], 0, None
        while place < len(rest):
            after, left = prompt + rest[:place], rest[place:]
            ones = (d for d in drawn if len(d.prompt_ids) == len(after) and d.begins(after, left))
            if (not mask or mask[place]) and (one := next(ones, None)) is not None:
                one.used, last = True, one
                segments.append(one.turn)
                place += len(one.turn.token_ids)
                continue
            if not mask or mask[place]:
                raise InputError(
                    f"{where}: token {place + 1} of the completion that rollout_func returned was not sampled by this "
                    "run after the tokens before it; return each turn with the very tokens that it was sampled after, "
                    "and mark what was given between turns as 0 in env_mask"
                )
            end = next((p for p in range(place, len(rest)) if mask[p]), len(rest))
            segments.append(Segment(rest[place:end], text=self.tokens.text(rest[place:end])))
            place = end
        if last is None:
            raise InputError(f"{where}: rollout_func returned nothing that was sampled")
        if self._limits.response_tokens is not None and len(rest) > self._limits.response_tokens:
            raise InputError(
                f"{where}: rollout_func returned {len(rest)} tokens; {self._limits.response_tokens} are allowed"
            )
        return Trajectory(segments, last.trajectory.finish_reason)


def _of_each(values: Any, count: int, what: str, field: str) -> Any:
    """A returned field with an entry per prompt, tensors and arrays as lists. `InputError` for anything else."""
    values, ids = to_plain(values), field in ("prompt_ids", "completion_ids")
    if values is None and not ids:
        return None
    lists = isinstance(values, list) and all(isinstance(one, list) or (one is None and not ids) for one in values)
    if not lists or (ids and any(type(token) is not int for one in values for token in one)):
        kind = "token ids" if ids else "numbers"
        raise InputError(f"{what} {field} {one_line(values, repr)}; they must be a list of {kind} for each prompt")
    if len(values) != count:
        raise InputError(f"{what} {len(values)} {field} for {count} prompts; give one each")
    return values


def _numbered(trajectory: Trajectory, key: SampleIdentity) -> Trajectory:
    """A trajectory with the identity and name that it is recorded by, which are unique, whatever keyed its tokens."""
    trajectory.identity, trajectory.name = key, f"group {key.group} sample {key.sample}"
    return trajectory


def _joined(drawn: list[_Drawn], prompt: list[int], rest: list[int]) -> list[_Drawn]:
    """The turns, each with a separate prompt, whose concatenated prompts are `prompt` and whose concatenated
    completions are `rest`; none if there are not at least two."""
    found: list[_Drawn] = []
    read = said = 0
    while read < len(prompt) or said < len(rest):
        one = next((d for d in drawn if d not in found and d.begins(prompt[read:], rest[said:])), None)
        if one is None:
            return []
        found.append(one)
        read, said = read + len(one.prompt_ids), said + len(one.turn.token_ids)
    return found if len(found) > 1 else []


def _trainer(generation: Generation, tokens: Tokens, sampling: SamplingParams, identity: SampleIdentity) -> Any:
    """What a function is given as its trainer: sampling parameters, tokenizer and generation."""
    same = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    how = {**same, "repetition_penalty": 1.0, "max_completion_length": sampling.max_completion_length}
    args = SimpleNamespace(**how, num_generations=sampling.n, generation_kwargs=None, report_to=[])
    alone = SimpleNamespace(process_index=0, num_processes=1, is_main_process=True, device="cpu")
    more: dict[str, Any] = {"use_vllm": True, "vllm_mode": "server", "tools": None, "chat_template": None}
    more |= {"chat_template_kwargs": {}, "num_generations": sampling.n, "num_generations_eval": sampling.n}
    more |= {"processing_class": tokens.tokenizer, "_tokenizer": tokens.tokenizer}
    more |= {"_tokenize_prompts": lambda prompts: ([tokens.prompt(prompt) for prompt in prompts], None, {})}
    more |= {"_generate_single_turn": generation.single_turn, "vllm_generation": generation}
    state = SimpleNamespace(global_step=identity.step)
    return SimpleNamespace(**how, **more, args=args, state=state, accelerator=alone)


class RolloutEnvironment(Environment):
    """One of the completions that `function` returns."""

    plays = RolloutPlay
    function: ClassVar[RolloutFunc]


def is_rollout_func(kind: Any) -> bool:
    """Whether `kind` is called with two arguments, the prompts and the trainer; a factory is called with none."""
    if isinstance(kind, type) or not callable(kind):
        return False
    try:
        inspect.signature(kind).bind([], None)
    except (TypeError, ValueError):
        return False
    needed = [
        p for p in inspect.signature(kind).parameters.values() if p.default is p.empty and p.kind < p.VAR_POSITIONAL
    ]
    return len(needed) == 2


def rollout_environment(function: RolloutFunc) -> type[RolloutEnvironment]:
    """An environment whose completions `function` returns."""
    return type("Rollouts", (RolloutEnvironment,), {"function": staticmethod(function)})
