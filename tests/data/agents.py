"""An environment with a tool that answers the same to the same, after any time, and may end the process."""

import itertools
import os
import random
import signal
import threading
import time
from typing import Any

from lockstep.environments import End, Environment, Turn

_calls = itertools.count(1)


class Agent(Environment):
    """Three turns, rewarded by the mean of their tokens, in hundreds. KILL_AFTER="CALLS SECONDS" ends the process with
    SIGKILL that long after the so-manieth turn."""

    def __init__(self) -> None:
        self.said: list[int] = []
        self.turns = 0

    def start(self, row: dict[str, Any], seed: int) -> str:
        return f"{row['prompt']} {seed % 1000}: "

    def step(self, turn: Turn) -> str | End:
        calls, seconds = os.environ.get("KILL_AFTER", "0 0").split()
        if next(_calls) == int(calls):
            threading.Timer(float(seconds), os.kill, (os.getpid(), signal.SIGKILL)).start()
        time.sleep(random.random() / 100)
        self.turns += 1
        self.said += turn.token_ids
        return self.cut() if self.turns == 3 else f" <{sum(self.said) * 2654435761 % 9973}> "

    def cut(self) -> End:
        return End({"mean": sum(self.said) / len(self.said) / 100, "turns": 0.1 * self.turns})
