"""The policy step: packing with shared prompts, losses, AdamW on flat buffers, and the trainer that combines them."""

from .optimizer import AdamW, frozen_parameters, learning_rate
from .packing import Packing, pack, pack_shards, packed_slots
from .parameters import FlatParameters
from .result import PendingResult, StepResult, averaged
from .shapes import BatchShape, batch_shapes, bucket
from .trainer import Mismatch, Trainer
