"""Several processes: who they are, what they agree on through the host, and the collectives that graphs hold."""

from .collectives import exchange, exchange_in_cells, gather, unshard
from .join import in_groups, join
from .mesh import Axis, Mesh
from .ranks import ONE, World
