"""The policy step: packing with shared prompts, losses, AdamW on flat buffers, and the trainer that joins them."""

from .losses import LOSSES
from .optimizer import AdamW, FlatParameters, learning_rate
from .packing import bucket, loss_weights, pack, padding_waste
from .trainer import Mismatch, StepResult, Trainer

__all__ = [
    "LOSSES",
    "AdamW",
    "FlatParameters",
    "Mismatch",
    "StepResult",
    "Trainer",
    "bucket",
    "learning_rate",
    "loss_weights",
    "pack",
    "padding_waste",
]
