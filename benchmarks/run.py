"""A benchmark of `cases`, by name, such as `python benchmarks/run.py flex --json flex.json`."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

import lockstep  # noqa: F401 (how threads wait is chosen before torch is imported, as in a run)

CASES = sorted(path.stem for path in (Path(__file__).parent / "cases").glob("*.py"))


def main() -> int:
    """Each case has `flags(parser)`, which adds its own, and `measure(args, report)`, which is true if what must hold
    does not. What it measures in processes of its own (`common.in_a_process`) is its `part`."""
    chosen = argparse.ArgumentParser(description=__doc__.splitlines()[0], add_help=len(sys.argv) == 2)
    chosen.add_argument("case", choices=CASES)
    name = chosen.parse_args(sys.argv[1:2]).case
    case = importlib.import_module(f"cases.{name}")
    if sys.argv[2:3] == ["--part"]:
        print(json.dumps(case.part(*sys.argv[3:])))
        return 0
    import torch  # not before a part, whose imports may be timed
    from common import Report, arguments

    from lockstep.machine import limit_cpu_threads

    parser = arguments(case.__doc__.splitlines()[0], prog=f"{Path(__file__).name} {name}")
    case.flags(parser)
    args = parser.parse_args(sys.argv[2:])
    limit_cpu_threads(torch.device(args.device))
    report = Report(name, args.json)
    failed = case.measure(args, report)
    report.finish()
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
