"""Tasks of the `reasoning-gym` package as data: `reasoning_gym:NAME`, or with settings `reasoning_gym:NAME,KEY=VALUE`.

A row is a function of the settings and its number, generated on access. `size` is the number of rows, `seed` the task's
seed, and all other keys belong to the task's configuration.
"""

from __future__ import annotations

from typing import Any

from ...errors import InputError
from ...user_functions import as_input_error
from ..base import RowSource, parse_setting

SCHEME = "reasoning_gym:"
_SIZE, _SEED = 1000, 42
_FORM = "NAME=VALUE with a value in JSON, as in size=500"


class ProceduralRows(RowSource):
    """Rows with `prompt`, the question; `answer`; and `metadata`, which the reward `reasoning_gym` scores by."""

    def __init__(self, data: str, label: str) -> None:
        """Raises `InputError` naming `label` if the package is missing, or does not know the task or a setting."""
        try:
            import reasoning_gym
        except ImportError as error:
            raise InputError(f"{label} needs a package: pip install 'lockstep-rl[reasoning-gym]' ({error})") from error
        name, *settings = data.removeprefix(SCHEME).split(",")
        given = {"size": _SIZE, "seed": _SEED} | dict(parse_setting(one, label, _FORM) for one in settings)
        if type(given["size"]) is not int or given["size"] < 1:
            raise InputError(f"{label}: size is {given['size']!r}; it must be a whole number of at least 1")
        self._size = given["size"]
        with as_input_error(f"{label} cannot be made:"):  # a task's checks may raise anything
            super().__init__(data, reasoning_gym.create_dataset(name, **given))

    def __len__(self) -> int:
        return self._size

    def row(self, index: int) -> dict[str, Any]:
        entry = self._rows[index]
        return {"prompt": entry["question"], "answer": entry["answer"], "metadata": entry["metadata"]}
