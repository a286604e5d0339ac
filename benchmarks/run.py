"""A benchmark of `cases`, by name, such as `python benchmarks/run.py flex --json flex.json`."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from common import Report, arguments

CASES = sorted(path.stem for path in (Path(__file__).parent / "cases").glob("*.py"))


def main() -> int:
    """Each case has `flags(parser)`, which adds its own, and `measure(args, report)`, which is true if what must hold
    does not."""
    chosen = argparse.ArgumentParser(description=__doc__.splitlines()[0], add_help=len(sys.argv) == 2)
    chosen.add_argument("case", choices=CASES)
    name = chosen.parse_known_args()[0].case
    case = importlib.import_module(f"cases.{name}")
    parser = arguments(case.__doc__.splitlines()[0], prog=f"{Path(__file__).name} {name}")
    case.flags(parser)
    args = parser.parse_args(sys.argv[2:])
    report = Report(name, args.json)
    failed = case.measure(args, report)
    report.finish()
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
