"""One file per section: its dataclass, the ranges of its fields, and its checks."""
