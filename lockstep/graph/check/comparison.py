"""Compares ways to run one launch of a function from the same state: eager, the graph at each stage, and its replay."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...distributed import World
from ..capture.step import GraphBody
from ..ir.captured import Captured, Inputs, Role, Static, inexact_results
from ..program import Program
from .bisect import Fault, find_faulty_replay, find_faulty_step
from .fingerprints import fingerprints, first_difference
from .snapshot import Snapshot
from .tolerance import bound, exceeds_bound


@dataclass(frozen=True)
class Case:
    """One launch to check.

    Attributes:
        name: what is special about it, for messages.
        user, statics: what the function is called with.
        load: sets up the initial state before each run; it may write what the run writes, every `buffer`, and
            `touches`.
        touches: for large state, as "role name", the views of it that `load` and the run may write. Every other input
            that the graph writes, and every `buffer`, is copied and restored whole.
        scratch: views that the run writes but whose values do not matter: restored, but not compared.
        filled_roles: roles whose tensors `load` fills entirely; their contents are restored once, after all cases
            (`tensors_to_restore`).
        derived: by role or "role name", functions that recompute tensors of `filled_roles` from the rest after all
            cases, so these are not copied.
        recompute: recomputes everything that the run writes from what it does not write, so nothing is copied.
        eager: called instead of the function's body; bitwise equal to it, in less memory.
    """

    name: str
    user: Mapping[str, Tensor] = field(default_factory=dict)
    statics: Mapping[str, Static] = field(default_factory=dict)
    load: Callable[[], object] = lambda: None
    touches: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    scratch: Sequence[Tensor] = ()
    filled_roles: Collection[Role] = ()
    derived: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    recompute: Callable[[], object] | None = None
    eager: GraphBody | None = None


@dataclass(frozen=True)
class _Observation:
    """What a run returned and wrote: hashes by name; `loose`, the names that need not equal eager bitwise; and the
    values of these after the run and, for state, before it."""

    fingerprints: Mapping[str, Tensor]
    loose: frozenset[str]
    values: Mapping[str, Sequence[Tensor]]
    before: Mapping[str, Sequence[Tensor]]


class Comparison:
    """Compares the ways to run one case of one function."""

    def __init__(self, function: Program, case: Case) -> None:
        self._recorder = function.tools.recorder
        self._function, self._case = function, case
        self._graph = function.graph(case.user, case.statics)
        self._captured = self._graph.captured
        self._inputs = replace(function.inputs, user=case.user)
        self._loose = inexact_results(self._captured)
        self._state = _changeable_state(self._captured, self._inputs, case)
        made = {f"{role} {name}" for role, name, _ in self._inputs.flat() if role in case.filled_roles}
        written = [view for name, views in self._state.items() if name not in made for view in views] + [*case.scratch]
        self._put_back = case.recompute or Snapshot(written).restore

    def fault(self, first: bool) -> Fault | None:
        """The fault, or None if there is none. `first`: for a graph that need not equal eager bitwise, also check the
        graph at every stage, even if its launch passes."""
        eager, launched = self._eager_and_launched()
        if not (first and self._loose) and self._differs(eager, launched) is None:
            return None
        captured = self._results(self._captured)
        earlier = [stage for _, stage in self._captured.stages()[:-1]] if self._loose else []
        if self._differs(eager, captured) or any(self._differs(eager, self._results(stage)) for stage in earlier):
            return find_faulty_step(
                self._captured,
                lambda: self._called(self._function.body),  # not `Case.eager`: calls must be in the graph's order
                self._inputs.tensors(),
                lambda stage: self._differs(eager, self._results(stage)),
                self._from_initial_state,
            )
        if self._loose:
            again = self._results(self._captured)
            if what := first_difference(captured.fingerprints, again.fingerprints):
                return Fault("repetition", None, what)
        what = first_difference(captured.fingerprints, launched.fingerprints)
        return self._faulty_replay(what) if what else None

    def fault_of_any(self, peers: World, first: bool) -> str | None:
        """What differs in which process; `first` as in `fault`. Collectives require that all processes run the same,
        whatever one of them finds, so the node is not searched for."""
        eager, launched = self._eager_and_launched()
        differs = self._differs(eager, launched) is not None
        if not any(peers.gather(first and bool(self._loose) or differs)):
            return None
        captured = self._results(self._captured)
        ways = {"the graph": captured, "its launch": launched}
        here = [f"{way} differs from eager in {at}" for way, seen in ways.items() if (at := self._differs(eager, seen))]
        if at := first_difference(captured.fingerprints, launched.fingerprints):
            here.append(f"the launch differs from the graph in {at}")
        found = [f"{what[0]} on rank {rank}" for rank, what in enumerate(peers.gather(here)) if what]
        return "; ".join(found) or None

    def _eager_and_launched(self) -> tuple[_Observation, _Observation]:
        """What eager returns and writes, and what a launch of the graph does, once it is recorded."""
        eager = self._from_initial_state(lambda: self._observe(lambda: self._in_pool(self._eager), frozenset()))
        if self._graph.records_next:
            self._from_initial_state(self._launch)
        return eager, self._from_initial_state(lambda: self._observe(self._launch, self._loose))

    def _from_initial_state(self, run: Callable[[], Any]) -> Any:
        """`run` from the case's state, which is restored afterwards."""
        with torch.inference_mode(False), torch.no_grad():
            self._case.load()
            try:
                return run()
            finally:
                self._put_back()

    def _observe(self, run: Callable[[], Mapping[str, Tensor]], loose: frozenset[str]) -> _Observation:
        """Run, and hash what it returns and writes; copy values of names that are loose in the checked graph."""
        before = {name: _clones(self._state[name]) for name in self._loose & self._state.keys()}
        found = {**{f"output {name}": [tensor] for name, tensor in run().items()}, **self._state}
        values = {name: _clones(found[name]) for name in self._loose & found.keys()}
        return _Observation(fingerprints(found), loose, values, before)

    def _differs(self, eager: _Observation, found: _Observation) -> str | None:
        """The first result that differs from eager's: bitwise or, for loose names, by more than the bound; or that only
        one of them has."""
        if odd := eager.fingerprints.keys() ^ found.fingerprints.keys():
            return f"{min(odd)}, which only one of them has"
        exact = {name: value for name, value in found.fingerprints.items() if name not in found.loose}
        if different := first_difference(eager.fingerprints, exact):
            return different
        limit = bound(self._captured)
        for name in sorted(found.loose):
            if exceeds_bound(found.values[name], eager.values[name], eager.before.get(name, ()), limit):
                return f"{name} by more than {limit:g} of it"
        return None

    def _eager(self) -> Mapping[str, Tensor]:
        return self._called(self._case.eager or self._function.body)

    def _called(self, body: GraphBody) -> Mapping[str, Tensor]:
        with torch.autograd.set_multithreading_enabled(False):  # other threads would allocate outside the pool
            return body(self._inputs, **self._case.statics)

    def _results(self, captured: Captured) -> _Observation:
        def interpreted() -> Mapping[str, Tensor]:
            outputs = captured.module.forward(*self._inputs.tensors())
            return dict(zip(captured.outputs, outputs, strict=True))

        loose = inexact_results(captured)
        return self._from_initial_state(lambda: self._observe(lambda: self._in_pool(interpreted), loose))

    def _launch(self) -> dict[str, Tensor]:
        return self._graph(self._case.user)

    def _in_pool(self, run: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """`run` in the recordings' memory pool, so that the check needs no other memory."""
        if self._recorder is None:
            return run()
        names: list[str] = []

        def outputs(_: Sequence[Tensor]) -> list[Tensor]:
            found = run()
            names.extend(found)
            return list(found.values())

        return dict(zip(names, self._recorder.run(outputs, []), strict=True))

    def _faulty_replay(self, what: str) -> Fault:
        assert self._recorder is not None
        own = {name: torch.zeros_like(tensor) for name, tensor in self._case.user.items()}
        arguments = replace(self._inputs, user=own).tensors()

        def load() -> None:
            for name, tensor in self._case.user.items():
                own[name].copy_(tensor)

        return find_faulty_replay(self._captured, self._recorder, arguments, load, self._from_initial_state, what)


def tensors_to_restore(work: Iterable[tuple[Program, Sequence[Case]]]) -> list[Tensor]:
    """The tensors of the cases' `filled_roles` that are not `derived`: to be restored after all cases."""
    found = list[Tensor]()
    for function, cases in work:
        made = {role for case in cases for role in case.filled_roles}
        derived = {what for case in cases for what in case.derived}
        for role, name, tensor in function.inputs.flat():
            if role in made and not derived & {role, f"{role} {name}"}:
                found.append(tensor)
    return found


def _clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _changeable_state(captured: Captured, inputs: Inputs, case: Case) -> dict[str, list[Tensor]]:
    """The state that a run may change, by input: whole tensors, or the views that the case declares. Eager writes what
    the graph as captured writes, even if a pass has lost such a write."""
    (_, as_captured), *_ = captured.stages()
    names = {captured.inputs[i].title for i in as_captured.written_inputs | captured.written_inputs}
    unknown = case.touches.keys() - {f"{role} {name}" for role, name, _ in inputs.flat()}
    assert not unknown, f"case {case.name!r} touches {unknown}, which are no inputs of {captured.title}"
    state: dict[str, list[Tensor]] = {}
    for role, name, tensor in inputs.flat():
        title = f"{role} {name}"
        if title in case.touches:
            state[title] = list(case.touches[title])
        elif title in names or role == "buffer":
            state[title] = [tensor]
    return state
