"""What a program that a model writes may use."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...errors import refuse


@dataclass(frozen=True)
class SandboxLimits:
    """Of one program. What holds for a process (processor time, memory) each of its processes may use.

    Attributes:
        seconds: from start to end, whatever it does; `cpu_seconds` of processor time.
        memory_mib: of addresses, not only of what was touched; `files_mib` of all its files.
        processes: and threads.
        output_bytes: of what it writes; the rest is cut off, and the program ended.
        patience: seconds that a program may wait until others have ended, of which as many run as there are cores.
    """

    seconds: float = 15.0
    cpu_seconds: int = 5
    memory_mib: int = 512
    files_mib: int = 16
    processes: int = 8
    output_bytes: int = 8192
    patience: float = 30.0

    @classmethod
    def within(cls, timeout: float) -> SandboxLimits:
        """Those by which a call is answered in fewer than `timeout` seconds (0: any)."""
        most = cls()
        if not timeout:
            return most
        return replace(most, seconds=min(most.seconds, timeout / 4), patience=min(most.patience, timeout / 2))

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            refuse(value <= 0, f"SandboxLimits: {name} is {value}; it must be more than 0")
