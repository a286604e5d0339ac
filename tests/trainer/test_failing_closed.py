"""A step that a check refuses leaves every bit as it was, and nothing is read from the device on the way."""

import math

import pytest
import torch
from small import stepped
from updates import FILTERED, LR, NoHostReads, bits, make_trainer, one_batch, same

from lockstep.errors import PeerLost
from lockstep.trainer import Mismatch, pack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_nan_advantage_changes_no_bit(make_model, make_groups, record, dtype):
    model = make_model(dtype)
    trainer = make_trainer(model)
    trainer.forward_backward(one_batch(record(model, make_groups())))
    assert trainer.optim_step(LR).applied
    before = bits(trainer)
    groups = record(model, make_groups(seed=1))
    groups[1].rollouts[0].advantage = math.nan
    trainer.forward_backward(one_batch(groups))
    result = trainer.optim_step(LR)
    assert not result.applied and not result.finite and math.isnan(result.loss)
    assert same(before, bits(trainer)) and trainer.weights_version == 1
    trainer.forward_backward(one_batch(record(model, make_groups(seed=1))))
    assert trainer.optim_step(LR).applied and trainer.weights_version == 2


def flip_bit(value):
    word = torch.tensor(value, dtype=torch.float32).view(torch.int32) ^ 1
    return word.view(torch.float32).item()


@pytest.mark.parametrize("kind, attribute", [("sampled", "logprobs"), ("model", "model_logprobs")])
def test_one_flipped_bit_stops_the_update_and_is_named(make_model, make_groups, record, kind, attribute):
    model = make_model()
    groups = record(model, make_groups())
    values = getattr(groups[2].rollouts[0], attribute)
    trainer_value, values[17] = values[17], flip_bit(values[17])
    expected = Mismatch("group 2 sample 0", 17, kind, generator=values[17], trainer=trainer_value)
    for how in ("forward_backward", "check"):
        trainer = make_trainer(model)
        before = bits(trainer)
        *others, last = pack(groups, max_tokens=200, check_parity=True)
        for batch in others:
            trainer.forward_backward(batch)
        getattr(trainer, how)(last)
        result = trainer.optim_step(LR)
        assert not result.applied and result.finite and trainer.weights_version == 0 and same(before, bits(trainer))
        assert result.tokens_different == 1 and result.mismatches == [expected]
        assert result.logprob_diff_max == abs(values[17] - trainer_value)

    trainer = make_trainer(model, enforce_parity=False)
    trainer.check(one_batch(groups))
    assert trainer.finish_check().mismatches == [expected]
    trainer.forward_backward(one_batch(groups))
    result = trainer.optim_step(LR)
    assert result.applied and result.mismatches == [expected] and not same(before, bits(trainer))


def test_an_update_whose_mismatches_could_not_be_gathered_is_counted_once(
    make_model, make_groups, record, monkeypatch: pytest.MonkeyPatch
):
    model = make_model()
    groups = record(model, make_groups())
    groups[0].rollouts[0].logprobs[0] = flip_bit(groups[0].rollouts[0].logprobs[0])
    trainer = make_trainer(model, enforce_parity=False)
    trainer.forward_backward(one_batch(groups))
    pending = trainer.launch_optim_step(LR)
    with monkeypatch.context() as patch:
        patch.setattr(type(trainer.world), "gather", lambda *_: (_ for _ in ()).throw(PeerLost("gone")))
        with pytest.raises(PeerLost, match="gone"):
            pending.get()
    assert trainer.weights_version == 0
    assert len(pending.get().mismatches) == 1 and trainer.weights_version == 1


def test_without_check_parity_nothing_is_compared(make_model, make_groups, record):
    model = make_model()
    groups = record(model, make_groups())
    groups[0].rollouts[0].logprobs[0] = flip_bit(groups[0].rollouts[0].logprobs[0])
    trainer = make_trainer(model)
    trainer.forward_backward(one_batch(groups, check_parity=False))
    result = trainer.optim_step(LR)
    assert result.applied and (result.tokens_checked, result.tokens_different) == (0, 0) and result.tokens > 0


def test_only_checks_leave_everything_as_it_was(make_model, make_groups, record):
    model = make_model()
    batch = one_batch(record(model, make_groups()))
    trainer = make_trainer(model)
    before = bits(trainer)
    trainer.check(batch)
    result = trainer.finish_check()
    assert not result.applied and same(before, bits(trainer)) and trainer.weights_version == 0
    assert result.finite and (result.tokens, result.tokens_different) == (0, 0) and result.entropy > 0
    assert result.tokens_checked == int(batch.valid_C.sum())
    trainer.check(batch)
    assert trainer.finish_check() == result


def test_nothing_reads_from_the_device_before_the_end_of_the_step(make_model, make_groups, record):
    model, reference = make_model(), make_model(seed=1)
    batch = one_batch(record(model, make_groups(FILTERED)))
    trainer = make_trainer(model, reference=reference, beta=0.1)
    with NoHostReads():
        trainer.reference_logprobs(batch)
        trainer.forward_backward(batch, keep_support=True)
        trainer.check(batch)
        _, applied = stepped(trainer.optimizer, LR)
        with pytest.raises(AssertionError, match="scalar"):
            bool(applied)
    assert applied
