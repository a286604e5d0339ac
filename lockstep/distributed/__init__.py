"""Several processes: who they are, what they agree on through the host, and the collectives that graphs hold."""

from .collectives import FSDP, exchange, gather, unshard
from .join import join
from .ranks import ONE, World

__all__ = ["FSDP", "ONE", "World", "exchange", "gather", "join", "unshard"]
