"""A captured graph bound to its static tensors and ready to be launched."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ...types import CoalescedTensors
from ..ir.captured import Captured, GraphError, Inputs
from ..ir.values import tensors_in
from ..ir.verify import overlapping
from .cudagraph import CudaRecorder, Recording
from .dry_run import dry_run
from .memory import Addresses, InputBuffers, Outputs


class GraphLauncher:
    """Launches one captured graph at one choice of its open sizes, as a CUDA graph if it is marked to be recorded.

    Static inputs are bound by address (`Addresses`); user inputs come with each launch, and a recorded graph copies
    them into buffers of its own. A recorded graph's outputs are overwritten by the next launch of any graph of the same
    recorder. Outputs in `lasting` are overwritten only by this graph's next launch, which first copies them if the last
    launch's `Outputs` are still referenced.

    Attributes:
        launches: launches so far, including replays.
        replays: replays of the recording.
        recording: the recording, once made.
    """

    def __init__(
        self, captured: Captured, inputs: Inputs, recorder: CudaRecorder | None = None, lasting: Collection[str] = ()
    ) -> None:
        self.captured = captured
        self.launches = self.replays = 0
        self._recorder = recorder if captured.recorded else None
        if captured.recorded and recorder is None:
            raise GraphError(f"{captured.title}: a CUDA graph needs a recorder")
        self.recording: Recording | None = None
        self._lasting = [i for i, name in enumerate(captured.outputs) if name in lasting] if self._recorder else []
        self._latest: weakref.ref[Outputs] | None = None
        self._layout: str | None = None  # layout of user inputs that passed the checks and can be copied whole
        self._closed = False
        self._arguments = inputs.tensors()
        self._static = [i for i, spec in enumerate(captured.inputs) if spec.role != "user"]
        self._user = {spec.name: i for i, spec in enumerate(captured.inputs) if spec.role == "user"}
        for i, spec in enumerate(captured.inputs):
            if problem := spec.mismatch(self._arguments[i]):
                raise GraphError(f"{captured.title}: {problem}")
        if shared := overlapping(captured, self._arguments):
            raise GraphError(f"{captured.title}: {shared}")
        self._sizes = inputs.open_sizes(captured.inputs)
        if broken := captured.sizes.broken_conditions(self._sizes):
            raise GraphError(f"{captured.title}: captured for sizes with {', '.join(broken)}")
        self._specs = inputs.specs({})  # every size fixed, from here on
        with torch.inference_mode(False):
            given = [self._arguments[i] for i in self._user.values()]
            self._own = InputBuffers(given if self._recorder else [])
            empty = [x.new_empty(0) for x in given]  # each launch brings its tensors
            self._expected = _described(given)
            for i, x in zip(self._user.values(), self._own.tensors or empty, strict=True):
                self._arguments[i] = x
        self._addresses = Addresses([self._arguments[i] for i in self._static])

    def __call__(self, user: Mapping[str, Tensor], times: int = 1) -> Outputs:
        """Launch `times` times in a row (at least 1); returns the last outputs by name. `GraphError`: the graph is
        closed, a user input is missing or not what the graph was captured for, or a static input has moved."""
        assert times > 0
        if self._closed:
            raise GraphError(f"{self.captured.title}: launched after close()")
        self._check_addresses()
        if self._recorder is None:
            self._check_user(user)
            return self._named(self._run_with(user, times))
        self._recorder.pool_used = True
        if self._latest is not None and (held := self._latest()) is not None:
            held.save(self.captured.outputs[i] for i in self._lasting)
        self._load_user_inputs(user)
        if self.recording is None:
            self.recording = self._record(self._recorder)
            self.launches, times = self.launches + 1, times - 1
        for _ in range(times):
            self.recording.replay()
        self.launches, self.replays = self.launches + times, self.replays + times
        found = self._named(self.recording.outputs)
        self._latest = weakref.ref(found) if self._lasting else None
        return found

    @property
    def records_next(self) -> bool:
        """Whether the next launch makes the recording instead of replaying it."""
        return self._recorder is not None and self.recording is None

    def rehearse(self, user: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Launch nothing and return zeros as outputs; see `dry_run.dry_run`."""
        return dry_run(self.captured, self._arguments if self._recorder else self._with(user))

    def zero_outputs(self) -> dict[str, Tensor] | None:
        """Zeros in the shapes of the outputs; None if a shape is not made of numbers and open sizes alone."""
        results: Any = self.captured.graph.output_node().args[0]
        values = tensors_in(tuple(map(self.captured.value, results)))
        shapes = [[self._sizes.get(d) if isinstance(d, str) else d for d in value.shape] for value in values]
        if len(values) < len(self.captured.outputs) or any(None in shape for shape in shapes):
            return None
        home = self.captured.inputs[0].device
        zeros = [torch.zeros(s, dtype=v.dtype, device=home) for s, v in zip(shapes, values, strict=True)]  # type: ignore[arg-type]
        return dict(zip(self.captured.outputs, zeros, strict=True))

    def record(self, blank: Mapping[str, Tensor]) -> None:
        """Record an unsplit graph without running it, unless it is recorded. `blank`: tensors like its outputs."""
        if self._recorder is None or self.recording is not None:
            return
        self._check_addresses()
        names = self.captured.outputs
        lasting = {i: torch.empty_like(blank[names[i]]) for i in self._lasting}
        with torch.inference_mode(False), torch.no_grad():
            self.recording = self._recorder.capture(self._run, self._arguments, lasting)

    def _named(self, outputs: Sequence[Tensor]) -> Outputs:
        return Outputs(zip(self.captured.outputs, outputs, strict=True))

    def _with(self, user: Mapping[str, Tensor]) -> list[Tensor]:
        """The arguments of an unrecorded launch, which uses the user's tensors themselves."""
        arguments = list(self._arguments)
        for name, i in self._user.items():
            arguments[i] = user[name]
        return arguments

    def _run_with(self, user: Mapping[str, Tensor], times: int) -> list[Tensor]:
        arguments = self._with(user)
        with torch.inference_mode(False), torch.no_grad():
            for _ in range(times):
                outputs = self._run(arguments)
                self.launches += 1
        return outputs

    def _load_user_inputs(self, user: Mapping[str, Tensor]) -> None:
        """Check a launch's user inputs, and copy them into the graph's buffers."""
        if not user and not self._user:
            return
        layout = user.layout if isinstance(user, CoalescedTensors) else None
        if isinstance(user, CoalescedTensors) and layout == self._layout:
            self._own.fill_whole(user.buffer)
            return
        self._check_user(user)
        if self._own.fill([user[name] for name in self._user]):
            self._layout = layout

    def _record(self, recorder: CudaRecorder) -> Recording:
        with torch.inference_mode(False), torch.no_grad():
            if self.captured.split_at:
                from .piecewise import Piecewise  # imported only if chosen

                return Piecewise(self.captured, recorder, self._arguments, self._lasting)
            return recorder.record(self._run, self._arguments, lasting=self._lasting)

    def _run(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        return self.captured.module.forward(*arguments)

    def _check_user(self, user: Mapping[str, Tensor]) -> None:
        if user.keys() != self._user.keys():
            odd = ", ".join(sorted(user.keys() ^ self._user.keys()))
            raise GraphError(f"{self.captured.title}: user inputs that are missing or unknown: {odd}")
        if _described([user[name] for name in self._user]) == self._expected:
            return
        for name, i in self._user.items():
            if problem := self._specs[i].mismatch(user[name]):
                raise GraphError(f"{self.captured.title}: {problem}")

    def _check_addresses(self) -> None:
        moved = self._addresses.moved()
        if moved is None:
            return
        spec = self.captured.inputs[self._static[moved]]
        raise GraphError(
            f"{self.captured.title}: static input {spec} has moved in memory since the graph was "
            "bound; write new values in place"
        )

    def close(self) -> None:
        if self.recording is not None:
            self.recording.close()
        self.recording, self._arguments, self._closed = None, [], True
        self._own, self._addresses = InputBuffers([]), Addresses([])


_looks = attrgetter("shape", "dtype", "device")


def _described(tensors: Sequence[Tensor]) -> tuple[list[Any], list[Any]]:
    """What must be equal between the inputs of launches, in a form that is compared at once."""
    return list(map(_looks, tensors)), list(map(Tensor.stride, tensors))
