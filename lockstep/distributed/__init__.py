"""Running as several processes: ranks and their meshes, agreement through the host, and the collectives in graphs."""

from .collectives import all_gather, all_to_all, all_to_all_in_cell, unshard
from .join import join, join_generator_groups
from .mesh import Axis, Mesh
from .ranks import ONE_PROCESS, World
