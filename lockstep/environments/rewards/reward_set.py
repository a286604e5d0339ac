"""Scoring a batch: reward functions are called, and their results checked and combined.

A reward function is `f(prompts, completions, completion_ids, **columns) -> list[float | None]`, plain or async. Each
argument is a list with one entry per completion, and so is the result. A conversational prompt's completion is
`[{"role": "assistant", "content": text}]`. None means that the function does not apply to that completion.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ...errors import InputError, refuse
from .calls import (
    LOCAL_NAMES,
    MAX_WEIGHT,
    Arguments,
    Failed,
    Logged,
    Outcome,
    RewardFunction,
    TrainerState,
    Values,
    accepted_arguments,
    call_all,
    describe_form,
)
from .workers import RewardWorkers

OnError = Literal["raise", "zero", "skip"]

_log = logging.getLogger("lockstep.environments")


@dataclass(frozen=True)
class Reward:
    """A reward function, with its name in metrics and messages, and its weight in the sum.

    `spec`, `module:function` or `path.py:function`, is what worker processes load; None: only this process has it.
    """

    name: str
    function: RewardFunction
    weight: float = 1.0
    spec: str | None = None


class Completions(NamedTuple):
    """What functions score, one entry per completion: its prompt, what was sampled (a text, or messages), its tokens,
    and the columns of its data row."""

    prompts: Sequence[str | list[dict[str, Any]]]
    completions: Sequence[str | list[dict[str, Any]]]
    completion_ids: Sequence[list[int]]
    rows: Sequence[dict[str, Any]]

    def arguments(self) -> tuple[list[str], Arguments]:
        """The columns that every row has, and all arguments by name. Completions of chats become messages."""
        completions = [
            text if isinstance(prompt, str) or not isinstance(text, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(self.prompts, self.completions, strict=True)
        ]
        columns = [name for name in self.rows[0] if all(name in row for row in self.rows)]
        found: Arguments = {name: [row[name] for row in self.rows] for name in columns}
        found |= {
            "prompts": list(self.prompts),
            "completions": completions,
            "completion_ids": list(self.completion_ids),
        }
        return columns, found


class Scores(NamedTuple):
    """The results, one entry per completion.

    Attributes:
        values: each function's value by name.
        totals: the weighted sum over the functions that apply; None: none does.
        unknown: whether there is no total because a function failed.
        errors: by function, how many values it failed to give.
    """

    values: list[dict[str, float | None]]
    totals: list[float | None]
    unknown: list[bool]
    errors: dict[str, int]


class Scoring(NamedTuple):
    """What is known about completions besides the functions' arguments.

    Attributes:
        where: where they are from, in messages, for example "step 3"; the groups are named after it. origins: the data
            row of each, in messages.
        groups: equal for the completions of a prompt, which are adjacent; workers are called per group.
        step: `trainer_state.global_step`.
        environments: for functions with an argument `environments`, one per completion.
        tell: called with the names of the functions that are being called.
    """

    where: str = ""
    origins: Sequence[str] = ()
    groups: Sequence[int] = ()
    step: int = 0
    environments: Sequence[Any] = ()
    tell: Callable[[str], None] = lambda names: None


class _Batch(NamedTuple):
    """The completions of one call: `arguments` by name, and for messages the step, the groups and the data rows.
    `group`: theirs, if they are of one prompt."""

    arguments: Arguments
    where: str
    groups: Sequence[int]
    origins: Sequence[str]
    group: int | None = None

    def __str__(self) -> str:
        text = f"{len(self.origins)} completion{'s' * (len(self.origins) != 1)}"
        if not self.where:
            return text
        ends = list(dict.fromkeys([*self.groups[:1], *self.groups[-1:]]))
        named = f", group{'s' * (len(ends) > 1)} {' to '.join(map(str, ends))}" if ends else ""
        return f"{text} of {self.where}{named}"


class RewardSet:
    """Reward functions, combined by a weighted sum over those that apply; without any, every reward is 0.

    Args:
        on_error: what happens if a function raises, crashes, takes too long or does not return a finite number. raise:
            end the run. zero: the values concerned are 0. skip: there are no values (as with None).
        workers: processes to call the functions in, once per prompt; None: call them here, with the whole batch.

    Attributes:
        in_workers: whether functions are called in other processes.
        logged: what functions logged while the last batch was scored. names: the functions' names, in order.
    """

    def __init__(
        self, rewards: Sequence[Reward], on_error: OnError = "raise", workers: RewardWorkers | None = None
    ) -> None:
        """`InputError`: two have the same name, a weight is too large, or workers cannot load a function."""
        self.names = names = [reward.name for reward in rewards]
        if twice := [name for name in names if names.count(name) > 1]:
            raise InputError(f"two rewards have the name {twice[0]}, by which their values are told: give one another")
        for reward in rewards:
            if not abs(reward.weight) <= MAX_WEIGHT:
                raise InputError(
                    f"task.reward_weights: the weight of reward {reward.name} is {reward.weight}; it must be between "
                    f"{-MAX_WEIGHT:g} and {MAX_WEIGHT:g}"
                )
            if workers is not None and reward.spec is None:
                raise InputError(
                    f"task.reward_workers: reward {reward.name} has no module:function name that another process "
                    "could find it by; set it to 0"
                )
        self.rewards = tuple(rewards)
        self._on_error = on_error
        self._workers, self.in_workers = workers, workers is not None
        # Calls that workers have begun, by function and group, with the names of their arguments.
        self._begun: dict[tuple[str, int | None], tuple[list[str], Future[Outcome]]] = {}
        self.logged = Logged(0)

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raise `InputError` if a function requires a column that is missing, or an argument that workers lack."""
        columns = list(columns)
        for reward in self.rewards:
            arguments = accepted_arguments(reward.name, reward.function, columns, self.in_workers)
            local_only = {*LOCAL_NAMES}.intersection(arguments).difference(columns)
            if local_only and self._workers is not None:
                raise InputError(f"reward {reward.name} takes {min(local_only)}, which needs task.reward_workers 0")

    def check_row(self, columns: dict[str, Any], origin: str) -> None:
        """Raise `InputError` if a function has an attribute `check_row` that refuses the columns of a data row."""
        for reward in self.rewards:
            try:
                getattr(reward.function, "check_row", lambda columns: None)(columns)
            except InputError as error:
                raise InputError(f"{origin}: reward {reward.name} {error}") from error

    def begin(self, completions: Completions, scoring: Scoring) -> None:
        """Have workers call the functions on one prompt's completions, before the rest of the batch is there. `score`
        uses the results if it would pass the same arguments."""
        assert self._workers is not None
        if not completions.prompts:
            return
        columns, arguments = completions.arguments()
        offered = arguments | {"trainer_state": TrainerState(scoring.step)}
        for reward in self.rewards:
            try:
                names = accepted_arguments(reward.name, reward.function, columns, in_worker=True)
            except InputError:  # `score` raises it, if it holds for the whole batch
                continue
            given = {name: offered.get(name) for name in names}
            outcome = self._workers.begin((reward.spec or "", given, len(completions.prompts)))
            self._begun[reward.name, scoring.groups[0]] = names, outcome

    def abandon(self) -> None:
        """Stop calls that were begun but not scored."""
        if self._workers is not None:
            self._workers.abandon([outcome for _, outcome in self._begun.values()])
        self._begun.clear()

    def score(self, completions: Completions, scoring: Scoring = Scoring()) -> Scores:  # noqa: B008
        """Score completions. Functions are given the columns that every row has. `InputError`: a function does not
        return a list, or one of the wrong length; or, if `on_error` is "raise", it raises, or returns something that
        is not a finite number."""
        count = len(completions.prompts)
        if not count:
            return Scores([], [], [], {})
        self.logged = Logged(count)
        if not self.rewards:
            return Scores([{} for _ in range(count)], [0.0] * count, [False] * count, {})
        offered = {
            "trainer_state": TrainerState(scoring.step),
            "log_metric": self.logged.log_metric,
            "log_extra": self.logged.log_extra,
            "environments": scoring.environments,
        }
        columns, arguments = completions.arguments()
        batches = self._batches(arguments, count, scoring)
        errors: Counter[str] = Counter()
        values: dict[str, list[float | None | Failed]] = {reward.name: [] for reward in self.rewards}
        calls = list(itertools.product(self.rewards, batches))
        outcomes = self._call(calls, columns, offered, scoring.tell)
        for (reward, batch), outcome in zip(calls, outcomes, strict=True):
            values[reward.name] += self._handle_failures(reward, batch, outcome, errors)
        scores = Scores([], [], [], dict(errors))
        for of_completion in zip(*values.values(), strict=True):
            row = {n: None if isinstance(v, Failed) else v for n, v in zip(values, of_completion, strict=True)}
            total = self._total(row)
            scores.values.append(row)
            scores.totals.append(total)
            scores.unknown.append(total is None and any(isinstance(value, Failed) for value in of_completion))
        return scores

    def _batches(self, arguments: Arguments, total: int, scoring: Scoring) -> list[_Batch]:
        """All completions as one batch or, for workers, as a batch per prompt."""
        groups, origins = scoring.groups, scoring.origins or [""] * total
        cuts = [0, total]
        if self._workers is not None and groups:
            cuts = [0, *(i for i in range(1, total) if groups[i] != groups[i - 1]), total]
        return [
            _Batch(
                {name: values[start:end] for name, values in arguments.items()},
                scoring.where,
                groups[start:end],
                origins[start:end],
                groups[start] if self._workers is not None and groups else None,
            )
            for start, end in itertools.pairwise(cuts)
        ]

    def _call(
        self,
        calls: Sequence[tuple[Reward, _Batch]],
        columns: list[str],
        offered: dict[str, Any],
        tell: Callable[[str], None],
    ) -> list[Outcome]:
        def on_begin(indices: Iterable[int]) -> None:
            tell(", ".join(dict.fromkeys(calls[i][0].name for i in indices)))

        taken = {r.name: accepted_arguments(r.name, r.function, columns, self.in_workers) for r in self.rewards}
        given = [
            {name: batch.arguments.get(name, offered.get(name)) for name in taken[reward.name]}
            for reward, batch in calls
        ]
        counts = [len(batch.origins) for _, batch in calls]
        if self._workers is not None:
            on_begin(range(len(calls)))
            begun, self._begun = self._begun, {}
            running: list[Future[Outcome]] = []
            for (reward, batch), arguments, count in zip(calls, given, counts, strict=True):
                key = reward.name, batch.group
                if key in begun and begun[key][0] == taken[reward.name]:
                    running.append(begun.pop(key)[1])
                else:
                    running.append(self._workers.begin((reward.spec or "", arguments, count)))  # __init__ checks spec
            for _, unwanted in begun.values():
                unwanted.cancel()
            return self._workers.outcomes(running)
        from . import torch_settings  # not in workers, which need no torch

        functions = [reward.function for reward, _ in calls]
        with torch_settings.preserve():
            return call_all(list(zip(functions, given, counts, strict=True)), on_begin)

    def _handle_failures(self, reward: Reward, batch: _Batch, outcome: Outcome, errors: Counter[str]) -> Values:
        """The call's values, with `on_error` applied to the failures among them."""
        count = len(batch.origins)
        if isinstance(outcome, Failed):
            first, what = outcome, f"the {batch}{_rows(batch.origins)}"
            if outcome.of_form:
                what += f"; {describe_form(batch.arguments['completions'], batch.origins)}"
            outcome = [outcome] * count
        else:
            failures = [(index, value) for index, value in enumerate(outcome) if isinstance(value, Failed)]
            if not failures:
                return outcome
            index, first = failures[0]
            origin = f" ({batch.origins[index]})" if batch.origins[index] else ""
            what = f"completion {index} of the {batch}{origin}"
        message = f"reward {reward.name} {first.reason} (for {what})"
        refuse(self._on_error == "raise" or first.fatal, message)
        if reward.name not in errors:  # the first of a batch; `errors` counts them all
            _log.warning("%s; such values %s", message, "count as 0" if self._on_error == "zero" else "are left out")
        errors[reward.name] += sum(isinstance(value, Failed) for value in outcome)
        return [0.0 if isinstance(value, Failed) and self._on_error == "zero" else value for value in outcome]

    def _total(self, row: dict[str, float | None]) -> float | None:
        terms = [r.weight * value for r in self.rewards if (value := row[r.name]) is not None]
        return sum(terms) if terms else None


def _rows(origins: Sequence[str]) -> str:
    """Words for the data rows of a batch: the first, and the last if it differs."""
    named = [origin for origin in origins if origin]
    if not named:
        return ""
    return f", {named[0]}" + (f" to {named[-1]}" if named[-1] != named[0] else "")
