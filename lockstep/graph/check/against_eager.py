"""Before the first step, each function's launches are checked against eager: all results must be bitwise equal. What
depends on a compiled region may differ within a bound (`tolerance`).

A function's owner provides the cases: inputs, initial state, and which parts of large state a run may write. State is
restored after every run. On a difference, the stage and node that caused it are named (`bisect`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from ...cache import fingerprint as cache_fingerprint
from ...cache import user_folder
from ...ops import cpu_build
from ..ir.captured import GraphError, Level, foreign_calls, title_of
from ..ir.text import digest
from ..program import Program
from ..runtime import Runtime
from ..store.key import body_name
from .comparison import Case, Comparison, tensors_to_restore
from .fingerprints import fingerprint, first_difference
from .snapshot import Snapshot

Mode = Literal["strict", "warn"]
MAX_KEPT = 4096  # passed checks to keep
_log = logging.getLogger("lockstep.graph")


@dataclass(frozen=True)
class Verdict:
    """What the check of the functions of one name found.

    Attributes:
        level: the level that the function runs at from now on.
        cases, known: how many launches were checked, and how many of these had passed before and were not run again.
        faults: what was found at faster levels; empty if nothing.
    """

    function: str
    level: Level
    cases: int
    known: int
    seconds: float
    faults: tuple[str, ...]


class PassedChecks:
    """Checks that passed before, by a key of all that they depend on: one small file each."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = (folder or user_folder.cache_folder()) / "verdicts"

    def passed(self, key: str) -> bool:
        found = user_folder.read(self._folder / f"{key}.json")
        return isinstance(found, dict) and found.get("key") == key

    def add(self, key: str, about: Mapping[str, Any]) -> None:
        user_folder.write(self._folder / f"{key}.json", {"key": key, **about}, keep=MAX_KEPT)


Work = Sequence[tuple[Program, Sequence[Case]]]


def check_against_eager(
    runtime: Runtime,
    work: Work,
    mode: Mode,
    verdicts: PassedChecks | None = None,
    spare: Sequence[Tensor] = (),
) -> list[Verdict]:
    """Check every function on its cases, those of one name together.

    Args:
        mode: on a difference, strict raises an error, and warn checks the function again one level further down.
        verdicts: checks that passed before, which are not repeated; None repeats all.
        spare: zeroed memory that no function with `Case.filled_roles` uses. It holds copies of state, and is zero again
            at the end.

    Raises:
        GraphError: in strict mode, a function differs from eager: names function, case, stage and node. In either
            mode: a run wrote state that its case does not declare.
    """
    functions = [function for function, _ in work]
    with runtime.timings.measure("verify"):
        state = _State(functions, spare, runtime.borrower.overwritable_addresses if runtime.borrower else ())
        names = dict.fromkeys(function.name for function in functions)
        found = []
        for name in names:
            of_name = [(function, cases) for function, cases in work if function.name == name]
            with state.restore_after(of_name):
                found.append(_check(runtime, of_name, mode, verdicts, state))
        if changed := state.changed():
            raise GraphError(f"the check of captured graphs left {changed} changed: a case must declare what it writes")
        for kept, key, about in state.passed:
            kept.add(key, about)
    return found


def _check(runtime: Runtime, work: Work, mode: Mode, verdicts: PassedChecks | None, state: _State) -> Verdict:
    """Check the functions of one name, at lower and lower levels until they pass."""
    began, name = time.perf_counter(), work[0][0].name
    faults: list[str] = []
    known = 0
    while (level := runtime.warm_up.level(name)) != "eager":
        fault, known = _first_fault(runtime, work, level, verdicts, state)
        if fault is not None and runtime.retrace(name):
            _log.warning("%s; it was a stored graph, and is captured anew", fault)
            continue
        if fault is None:
            break
        if mode == "strict":
            raise GraphError(f"{fault}. compile.verify warn runs the function one level further down instead")
        faults.append(fault)
        _log.warning("%s; the function now runs one level further down: %s", fault, runtime.lower_level(name))
    cases = sum(len(cases) for _, cases in work)
    return Verdict(name, level, cases, known, time.perf_counter() - began, tuple(faults))


def _first_fault(
    runtime: Runtime, work: Work, level: Level, verdicts: PassedChecks | None, state: _State
) -> tuple[str | None, int]:
    """The first case that differs, as a message, and how many cases were known to pass."""
    known = 0
    of_graphs: dict[int, tuple[str, PassedChecks | None]] = {}  # by id: a graph's digest, and where its checks are kept
    computing = cpu_build(), sorted(runtime.builder.backend.settings().items())
    for function, case in [(function, case) for function, cases in work for case in cases]:
        captured = function.graph(case.user, case.statics).captured
        if first := id(captured) not in of_graphs:  # no key covers code from outside the package
            kept = None if cache_fingerprint.is_modified() or foreign_calls(captured) else verdicts
            of_graphs[id(captured)] = digest(captured), kept
        text, kept = of_graphs[id(captured)]
        shapes = [(title, tuple(tensor.shape)) for _, title, tensor in replace(function.inputs, user=case.user).flat()]
        asked = title_of(function.name, case.statics), body_name(function.body)
        this = cache_fingerprint.key(text, asked, level, case.name, shapes, computing)
        if verdicts and not any(runtime.peers.gather(kept is None or not kept.passed(this))):
            known += 1
            continue
        state.remember()
        trial = Comparison(function, case)
        if fault := trial.fault(first) if runtime.peers.size == 1 else trial.fault_of_any(runtime.peers, first):
            return f"{captured.title}, case {case.name!r}: {fault}", known
        del trial  # frees its copies before the next one's are made
        if kept:
            state.passed.append((kept, this, {"function": captured.title, "level": level, "case": case.name}))
    return None, known


class _State:
    """Hashes of the functions' static inputs from before the first run. `lent`: addresses to skip, of memory that
    unrelated graphs overwrite. `passed`: checks to be kept if all state was restored."""

    def __init__(self, functions: Iterable[Program], spare: Sequence[Tensor], lent: Collection[int]) -> None:
        self._functions, self._spare, self._lent = list(functions), spare, lent
        self._before: dict[str, Tensor] | None = None
        self.passed: list[tuple[PassedChecks, str, Mapping[str, Any]]] = []
        self._made: Work = ()
        self._held: Snapshot | None = None

    def remember(self) -> None:
        if self._before is None:
            self._before = self._all()
        if self._held is None:
            self._held = Snapshot(tensors_to_restore(self._made), self._spare)

    @contextmanager
    def restore_after(self, work: Work) -> Iterator[None]:
        """Afterwards, the state that the cases made holds what it did before their first run."""
        self._made = work
        try:
            yield
        finally:
            if self._held is not None:
                self._held.restore()
                for derive in {derive for _, cases in work for case in cases for derive in case.derived.values()}:
                    derive()
            self._held = None

    def changed(self) -> str | None:
        return None if self._before is None else first_difference(self._before, self._all())

    def _all(self) -> dict[str, Tensor]:
        """A hash of every static input, one per distinct memory range."""
        seen: set[tuple[int, int]] = set()
        hashes: dict[str, Tensor] = {}
        for i, function in enumerate(self._functions):
            for role, name, tensor in function.inputs.flat():
                place = tensor.data_ptr(), tensor.numel() * tensor.element_size()
                if place not in seen and place[0] not in self._lent:
                    seen.add(place)
                    hashes[f"{role} {name!r} of {function.name} ({i})"] = fingerprint(tensor)
        return hashes
