"""Which keys a query sees, beyond causality: a sliding window, and a user's function by name.

Operators take a mask as a window and a name, which a graph can hold. The function with that name is registered here
before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

# Maps a query's and a key's absolute positions (int32 tensors that broadcast) to a bool tensor.
MaskFunction = Callable[[Tensor, Tensor], Tensor]

_REGISTERED: dict[str, MaskFunction] = {}


def register_mask(name: str, function: MaskFunction) -> None:
    """Make `function` available to operators as `name`. If the function changes, so should the name: what was compiled
    or checked under a name is kept."""
    _REGISTERED[name] = function


def visibility(window: int, mask: str) -> MaskFunction:
    """Returns the function that says whether a query at one position sees the key at another of its sequence.

    Args:
        window: how many of the last keys a query sees, its own included; 0: all.
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
