"""Updates of a trainer, and the bits that they leave."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.config import LossConfig, OptimizerConfig
from lockstep.graph import EAGER
from lockstep.trainer import Trainer, pack
from lockstep.types import SamplingParams

MAX_TOKENS = 1 << 12
LR = 1e-2
WARM = SamplingParams(temperature=0.7)
FILTERED = SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.02)


def make_trainer(model, *, reference=None, enforce_parity=True, runtime=EAGER, **loss):
    options = {"reference": reference, "enforce_parity": enforce_parity, "runtime": runtime}
    return Trainer(model, OptimizerConfig(weight_decay=0.1), LossConfig(**loss), **options)


def one_batch(groups, **options):
    (batch,) = pack(groups, **{"max_tokens": MAX_TOKENS, "check_parity": True, **options})
    return batch


def gradients(trainer, batches):
    """The accumulated gradients; the trainer is left as it was."""
    for batch in batches:
        trainer.forward_backward(batch)
    grad = trainer.flat.grad.clone()
    assert not trainer.finish_check().applied and not trainer.flat.grad.any()
    return grad


def bits(trainer):
    tensors = {**trainer.state()[0], "weights": trainer.flat.data}
    return [t.clone().view(torch.int32 if t.dtype == torch.float32 else torch.int16) for t in tensors.values()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class NoHostReads(TorchDispatchMode):
    """Fails where Python looks at a tensor's value or a shape depends on one: what a CUDA graph could not hold."""

    READS = {
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.is_nonzero.default,
        torch.ops.aten.nonzero.default,
        torch.ops.aten.masked_select.default,
        torch.ops.aten.equal.default,
    }

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in self.READS, func
        return func(*args, **(kwargs or {}))
