"""Running as several processes: ranks and their meshes, agreement through the host, and the collectives in graphs."""

from .collectives import exchange, exchange_in_cells, gather, unshard
from .join import in_groups, join
from .mesh import Axis, Mesh
from .ranks import ONE, World
