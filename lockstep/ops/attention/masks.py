"""Which keys a query sees, beyond causality: a sliding window, and a user's function by name.

Operators take a mask as a window and a name, which a graph can hold; the function behind the name is registered here
before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

# Of a query's and a key's absolute position (int32 tensors that broadcast) to a bool tensor.
MaskFunction = Callable[[Tensor, Tensor], Tensor]

_REGISTERED: dict[str, MaskFunction] = {}


def register_mask(name: str, function: MaskFunction) -> None:
    """Let operators know `function` as `name`. The name should change with the function: what was compiled or checked
    under it is kept."""
    _REGISTERED[name] = function


def visibility(window: int, mask: str) -> MaskFunction:
    """Whether a query at one position sees the key at another of its sequence.

    Args:
        window: of so many last keys, the query's own among them; 0: of all.
        mask: a registered name; "": none.

    Raises:
        KeyError: nothing is registered under the name.
    """
    function = _REGISTERED[mask] if mask else None

    def visible(query: Tensor, key: Tensor) -> Tensor:
        seen = key <= query
        if window:
            seen = seen & (key > query - window)
        return seen if function is None else seen & function(query, key)

    return visible
