"""What `lockstep replay` reads of a record: a damaged one is named before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import InputError
from lockstep.run.replay.record import recorded_sample

GIVEN, SAMPLED = {"kind": "given", "tokens": 2, "token_ids": [1, 2]}, {"kind": "sampled", "tokens": 2}
WHOLE: dict[str, Any] = {"sample": 0, "segments": [GIVEN, SAMPLED], "token_ids": [3, 4]}


@pytest.mark.parametrize(
    "samples",
    [
        3,
        [3],
        [{"sample": 0}],
        [{**WHOLE, "token_ids": [3]}],
        [{**WHOLE, "token_ids": ["3", 4]}],
        [{**WHOLE, "segments": []}],
        [{**WHOLE, "segments": [SAMPLED]}],
        [{**WHOLE, "segments": [GIVEN]}],
        [{**WHOLE, "segments": [{**GIVEN, "token_ids": 7}, SAMPLED]}],
        [{**WHOLE, "segments": [GIVEN, {"kind": "sampled", "tokens": "x"}]}],
        [{**WHOLE, "segments": [GIVEN, SAMPLED, {"kind": "given", "tokens": 2}]}],
    ],
)
def test_a_damaged_record_is_named(tmp_path: Path, samples: Any) -> None:
    (tmp_path / "config.yaml").touch()
    for found in ([WHOLE], samples):
        (tmp_path / "rollouts.jsonl").write_text(json.dumps({"step": 0, "group": 0, "samples": found}) + "\n")
        if found == [WHOLE]:
            assert recorded_sample(tmp_path, 0, 0, 0)[1] == WHOLE
            continue
        with pytest.raises(InputError, match="rollouts.jsonl: what it has of trajectory 0/0/0 is damaged"):
            recorded_sample(tmp_path, 0, 0, 0)
