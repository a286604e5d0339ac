"""An update is written only when every sampled token was compared and found identical, as the comparison counts."""

import math

import pytest
import torch
from updates import LR, NoHostReads, bits, make_trainer, one_batch, same

from lockstep.config import CompileConfig
from lockstep.graph import EAGER, Runtime, Store
from lockstep.trainer import pack, step


def runtime_of(capture):
    return Runtime(CompileConfig("step"), torch.device("cpu"), store=Store()) if capture == "step" else EAGER


def tokens_of(groups):
    return sum(len(s.token_ids) for g in groups for s in g.rollouts)


@pytest.mark.parametrize("capture", ["none", "step"])
def test_tokens_that_are_not_compared_stop_the_update(make_model, make_groups, record, capture):
    """Every second token is dropped from `valid_C` of one batch: nothing that is compared differs."""
    model = make_model()
    groups = record(model, make_groups())
    tokens = tokens_of(groups)
    for how in ("forward_backward", "check"):
        trainer = make_trainer(model, runtime=runtime_of(capture))
        before = bits(trainer)
        *others, last = pack(groups, max_tokens=200, check_parity=True)
        for batch in others:
            trainer.forward_backward(batch)
        dropped = int(last.valid_C[1::2].sum())
        last.valid_C[1::2] = False
        getattr(trainer, how)(last)
        result = trainer.optim_step(LR)
        assert dropped > 10 and (result.tokens_sampled, result.tokens_checked) == (tokens, tokens - dropped)
        assert result.tokens_different == 0 and result.tokens_not_covered == dropped and not result.identical
        assert not result.applied and result.finite and same(before, bits(trainer)) and trainer.weights_version == 0


def test_the_number_sampled_is_the_callers(make_model, make_groups, record):
    """One sequence was never packed, and then one too many."""
    model = make_model()
    groups = record(model, make_groups())
    tokens, trainer = tokens_of(groups), make_trainer(model)
    before = bits(trainer)
    for sampled in (tokens + 5, tokens - 5, 0):
        trainer.forward_backward(one_batch(groups))
        with NoHostReads():
            pending = trainer.launch_optim_step(LR, sampled)
        result = pending.get()
        assert not result.applied and same(before, bits(trainer))
        assert result.tokens_not_covered == sampled - tokens and result.tokens_different == 0
        trainer.check(one_batch(groups))
        assert trainer.finish_check(sampled).tokens_not_covered == sampled - tokens
    trainer.forward_backward(one_batch(groups))
    assert trainer.optim_step(LR, tokens).applied and not same(before, bits(trainer))


def test_without_enforcement_it_is_counted(make_model, make_groups, record):
    model = make_model()
    groups = record(model, make_groups())
    trainer = make_trainer(model, enforce_parity=False)
    trainer.forward_backward(one_batch(groups))
    result = trainer.optim_step(LR, tokens_of(groups) + 1)
    assert result.applied and result.tokens_not_covered == 1 and not result.identical


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("attribute, kind", [("logprobs", "sampled"), ("model_logprobs", "model")])
def test_what_is_not_a_number_is_never_identical(make_model, make_groups, record, monkeypatch, value, attribute, kind):
    """Though both have the same bits of it; on a batch that is only checked there is no loss that would tell."""
    model = make_model()
    groups = record(model, make_groups())
    getattr(groups[1].rollouts[1], attribute)[4] = value
    row = int(one_batch(groups).logit_rows_C.new_tensor([3 + 1 + 40 + 7 + 4]))
    score = step.score

    def with_the_same(*arguments):
        rows_CD, scores, routed = score(*arguments)
        field = {"logprobs": "logprob_C", "model_logprobs": "model_logprob_C"}[attribute]
        planted = getattr(scores, field).clone()
        planted[row] = value
        return rows_CD, scores._replace(**{field: planted}), routed

    monkeypatch.setattr(step, "score", with_the_same)
    trainer = make_trainer(model)
    trainer.check(one_batch(groups))
    result = trainer.finish_check()
    assert (result.tokens_different, result.tokens_not_covered) == (1, 0) and math.isnan(result.logprob_diff_max)
    assert [(m.request, m.position, m.kind) for m in result.mismatches] == [("group 1 sample 1", 4, kind)]
