"""The policy step: packing with shared prompts, losses, AdamW on flat buffers, and the trainer that joins them."""

from ..algorithms.losses import LOSSES
from .optimizer import AdamW, learning_rate
from .packing import Packing, loss_weights, pack, pack_shards, packed_slots
from .parameters import FlatParameters
from .result import PendingResult, StepResult
from .routing import RoutingResult
from .shapes import BatchShape, batch_shapes, bucket
from .trainer import Mismatch, Trainer

__all__ = [
    "LOSSES",
    "AdamW",
    "BatchShape",
    "FlatParameters",
    "Mismatch",
    "Packing",
    "PendingResult",
    "RoutingResult",
    "StepResult",
    "Trainer",
    "batch_shapes",
    "bucket",
    "learning_rate",
    "loss_weights",
    "pack",
    "pack_shards",
    "packed_slots",
]
