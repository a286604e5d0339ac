"""The sampler's frequencies against probabilities that are computed here, in float64, by the filters' definitions."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from c_library import using
from torch import Tensor

from lockstep import ops
from lockstep.ops.logprobs import reference as logprobs_reference
from lockstep.ops.logprobs.philox import sample_key
from lockstep.ops.native import library

DRAWS = 20_000
LOGITS = [2.0, 1.7, 1.1, 0.9, 0.3, 0.0, -0.4, -0.8, -1.3, -1.9, -2.2, -3.1, -4.0]
FILTERS = {
    "temperature 1": (1.0, 0, 1.0, 0.0),
    "temperature 0.6": (0.6, 0, 1.0, 0.0),
    "temperature 1.7": (1.7, 0, 1.0, 0.0),
    "top-k": (1.0, 5, 1.0, 0.0),
    "top-p": (1.0, 0, 0.8, 0.0),
    "min-p": (1.0, 0, 1.0, 0.12),
    "all": (1.3, 8, 0.85, 0.2),
}


def probabilities(temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """Of each token of `LOGITS`, which descend.

    Temperature, then the k largest, of them the fewest that hold a share p, and those of at least min_p times the
    largest's probability.
    """
    weights = [math.exp(logit / temperature) for logit in LOGITS]
    kept = len(weights) if top_k == 0 else top_k
    total, share = sum(weights[:kept]), 0.0
    for i in range(kept):
        if share >= top_p * total:
            kept = i
            break
        share += weights[i]
    kept = min(kept, sum(weight >= min_p * weights[0] for weight in weights))
    return [weight / sum(weights[:kept]) if i < kept else 0.0 for i, weight in enumerate(weights)]


def drawn(temperature: float, top_k: int, top_p: float, min_p: float, vary: str) -> Tensor:
    """How often each token was drawn, over samples of a group, or over the positions of one sample."""
    rows = torch.arange(DRAWS)
    if vary == "samples":
        key, position = (
            torch.tensor([sample_key(2**50 + 3, 0, 2, 5, i) for i in range(DRAWS)]),
            torch.full_like(rows, 9),
        )
    else:
        key, position = torch.tensor([sample_key(11, 0, 2, 5, 1)]).expand(DRAWS, -1).contiguous(), rows
    hidden, weight = torch.ones(DRAWS, 1), torch.tensor(LOGITS).unsqueeze(1)
    filters = [torch.full((DRAWS,), value) for value in (temperature, top_k, top_p, min_p)]
    filters[1] = filters[1].int()
    truncated = (top_k, top_p, min_p) != (0, 1.0, 0.0)
    token = ops.sample(hidden, weight, ops.SampleKeys(key, position), ops.Filters(*filters), truncated, False)[0]
    return torch.bincount(token, minlength=len(LOGITS))


def p_value(counts: Tensor, expected: list[float]) -> float:
    """Pearson's chi-square test: how likely counts at least as far off are."""
    p = torch.tensor(expected, dtype=torch.float64)
    assert counts[p == 0].sum() == 0
    counts, p = counts[p > 0].double(), p[p > 0]
    statistic = ((counts - DRAWS * p) ** 2 / (DRAWS * p)).sum()
    return float(torch.special.gammaincc(torch.tensor((len(p) - 1) / 2, dtype=torch.float64), statistic / 2))


@pytest.mark.parametrize("path", ["native", "reference"])
@pytest.mark.parametrize("vary", ["samples", "positions"])
@pytest.mark.parametrize("name", FILTERS)
def test_frequencies_are_the_probabilities(name: str, vary: str, path: str) -> None:
    if path == "native" and library.built is None:
        pytest.skip("the C library is not built")
    with using(None) if path == "reference" else nullcontext():
        counts = drawn(*FILTERS[name], vary)
    assert p_value(counts, probabilities(*FILTERS[name])) > 1e-4


def test_another_distribution_is_noticed() -> None:
    """The negative control: a temperature off by 5 %, and one token too many."""
    counts = drawn(1.05, 0, 1.0, 0.0, "samples")
    assert p_value(counts, probabilities(1.0, 0, 1.0, 0.0)) < 1e-4
    with pytest.raises(AssertionError):
        p_value(drawn(1.0, 6, 1.0, 0.0, "samples"), probabilities(1.0, 5, 1.0, 0.0))


def test_neighbouring_draws_are_independent() -> None:
    """Pairs at neighbouring positions fill the product of their distributions."""
    key, position = torch.tensor([sample_key(0, 0, 0, 0, 0)]).expand(DRAWS, -1).contiguous(), torch.arange(DRAWS)
    hidden, weight = torch.ones(DRAWS, 1), torch.zeros(4, 1)
    one = torch.ones(DRAWS)
    filters = ops.Filters(one, 0 * one.int(), one, 0 * one)
    token = ops.sample(hidden, weight, ops.SampleKeys(key, position), filters, False, False)[0]
    pairs = torch.bincount(token[::2] * 4 + token[1::2], minlength=16).double()
    statistic = ((pairs - DRAWS / 32) ** 2 / (DRAWS / 32)).sum()
    assert torch.special.gammaincc(torch.tensor(7.5, dtype=torch.float64), statistic / 2) > 1e-4


def test_keys_are_philox_of_the_whole_seed() -> None:
    """A vector of the authors' own (Random123, `kat_vectors`), whose key is a seed of 64 bits."""
    words = sample_key(0x299F31D0A4093822, 0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert words == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)
    assert len({sample_key(1 + (bit and 1 << bit), 0, 0, 0, 0) for bit in (0, 32, 40, 62)}) == 4


def test_top_p_ends_where_the_mass_is_exactly_p() -> None:
    """Probabilities 1/2, 1/4, 1/8, 1/8: a logit stays when the larger ones hold less than p, not when they hold p."""
    logits = -math.log(2.0) * torch.tensor([[0.0, 1.0, 2.0, 2.0]])
    assert torch.equal(logits.exp(), torch.tensor([[1.0, 0.5, 0.25, 0.25]]))
    for exact, kept in ((0.5, 1), (0.75, 2)):
        for top_p, expected in (
            (exact, kept),
            (math.nextafter(exact, 0), kept),
            (exact + 2.0**-24, {1: 2, 2: 4}[kept]),
        ):
            threshold = logprobs_reference.support_threshold(
                logits, torch.zeros(1).int(), torch.tensor([top_p]), torch.zeros(1)
            )
            assert int((logits >= threshold).sum()) == expected
