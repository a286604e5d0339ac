"""The policy step: packing with shared prompts, losses, AdamW on flat buffers, and the trainer that combines them."""

from .optimizer import AdamW, frozen_parameters, learning_rate
from .packing import Packing, count_slots, pack, pack_shards
from .parameters import FlatParameters
from .result import PendingResult, StepResult, average_results
from .shapes import BatchShape, batch_shapes, round_to_bucket
from .trainer import Mismatch, Trainer
