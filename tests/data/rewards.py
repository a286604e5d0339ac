"""A reward whose values spread over any sample, for tests that need every step to train."""

import os
import signal
import threading
import time

_calls = 0


def spread(completion_ids: list[list[int]], **_: object) -> list[float]:
    """The mean token id, in hundreds. KILL_AFTER="CALLS SECONDS" ends the process with SIGKILL that long after its
    so-manieth call; SPOIL="CALLS" sends SIGTERM in it, and what it needs is gone as well. PAUSE="CALLS FILE" makes a
    file in it, and waits for a while."""
    global _calls
    _calls += 1
    calls, seconds = os.environ.get("KILL_AFTER", "0 0").split()
    if _calls == int(calls):
        threading.Timer(float(seconds), os.kill, (os.getpid(), signal.SIGKILL)).start()
    if _calls == int(os.environ.get("SPOIL", "0")):
        os.kill(os.getpid(), signal.SIGTERM)
        raise OSError("its program was ended")
    calls, path = os.environ.get("PAUSE", "0 ").split(" ")
    if _calls == int(calls):
        open(path, "w").close()
        time.sleep(1.0)
    return [sum(ids) / len(ids) / 100 for ids in completion_ids]
