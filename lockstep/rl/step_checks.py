"""Checks of a step's result: it must be finite and, with strict parity, identical in both roles."""

from __future__ import annotations

import math

from ..errors import NonFiniteError, ParityError
from ..session.certificate import Certificate
from ..trainer import StepResult


def check_step_result(parity: str, certificate: Certificate, step: int, result: StepResult, sampled: int) -> None:
    """Check a step's first result and, unless `parity` is "off", add it to the certificate with the `sampled` tokens to
    be compared. Raises as `require_finite` and, if `parity` is "strict", as `raise_mismatch`."""
    if parity != "off":
        certificate.add(step, result, sampled)
    require_finite(f"step {step + 1}", result)
    if parity == "strict" and not result.identical:
        raise_mismatch(step, result)


def require_finite(where: str, result: StepResult) -> None:
    """Raise `NonFiniteError`, with `where` in front, unless loss, gradient norm and entropy are finite."""
    if not (result.finite and math.isfinite(result.entropy)):  # entropy includes tokens that are only checked
        raise NonFiniteError(
            f"{where}: loss is {result.loss}, gradient norm {result.grad_norm}, entropy {result.entropy}; "
            f"the weights were {'changed' if result.applied else 'not changed'}"
        )


def raise_mismatch(step: int, result: StepResult) -> None:
    """Raise `ParityError`, which lists the first differing tokens, or how many were not compared. The weights are those
    from before the step."""
    lines = [
        f"{m.request}, completion token {m.position}, {m.kind}: generator {m.generator!r}, trainer {m.trainer!r}"
        for m in result.mismatches
    ]
    counts = f"{result.tokens_different} of {result.tokens_checked} tokens differ between generator and trainer"
    if result.routing is not None and result.routing.tokens_different:
        counts += f", of which {result.routing.tokens_different} went to other experts (digests of the choices differ)"
    if result.routing is not None and result.routing.prompt_tokens_different:
        counts += f"; {result.routing.prompt_tokens_different} prompt tokens went to other experts"
    if result.tokens_not_covered:
        counts += f"; {result.tokens_sampled} were sampled"
    raise ParityError("\n  ".join([f"step {step + 1}: {counts}; the weights were not changed", *lines]))
