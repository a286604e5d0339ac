"""Checkpoints of a run: their files, and how a run goes on while they are written."""

from .files import LoadedCheckpoint, latest, part_of
from .saver import Saver
