"""Checkpoints of a run: their files, and writing them while the run continues."""

from .files import LoadedCheckpoint, latest, part_name
from .saver import Saver
