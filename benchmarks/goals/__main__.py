"""Every goal of speed and size: measured, and whether it is reached. One command for all tables.

    python -m benchmarks.goals [--threads N] [--peer-python PYTHON] [--folder runs/goals]

Runs the commands that `--list` shows, one after the other, each with a time of its own. What each
printed is kept in the folder as NAME.txt, to copy tables from, and its last line, which is JSON, in
results.json. A part that is there already is not run again, unless --again names it or its command
has changed; one that failed is. So it can be ended and begun again. The goals are then read off the
results: `wanted.py` has their bounds.

llama.cpp and `transformers serve` are compared with where --peer-python names an interpreter that
has them (benchmarks/README.md makes one); without, those goals stay open. --small tries everything
out with a tiny model: its numbers mean nothing. Run it on a machine that does nothing else; the
last line is JSON.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.goals.parts import ROOT, Plan, parts
from benchmarks.goals.running import run_all
from benchmarks.goals.wanted import goals, judged, table
from model.device import available_processors


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.goals",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--threads", type=int, default=available_processors())
    parser.add_argument("--peer-python", metavar="PYTHON")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "goals")
    parser.add_argument("--again", nargs="+", default=[], metavar="PART")
    parser.add_argument("--only", nargs="+", metavar="PART", help="run none but these")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--list", action="store_true", help="show the commands and run none")
    arguments = parser.parse_args(argv)
    names = [part.name for part in parts(plan_of(arguments))]
    if unknown := {*arguments.again, *(arguments.only or ())} - set(names):
        parser.error(f"no part is named {sorted(unknown)}; there are {', '.join(names)}")
    return arguments


def plan_of(arguments: argparse.Namespace) -> Plan:
    folder = arguments.folder / "small" if arguments.small else arguments.folder
    return Plan(folder.resolve(), arguments.threads, arguments.peer_python, arguments.small)


def main(argv: Sequence[str]) -> None:
    arguments = parse(argv)
    plan = plan_of(arguments)
    if arguments.list:
        for part in parts(plan):
            print(f"{part.name}: {' '.join(part.command)}")
        return
    plan.folder.mkdir(parents=True, exist_ok=True)
    results = run_all(plan, again=arguments.again, only=arguments.only)
    rows = [judged(goal, results) for goal in goals(plan)]
    print(f"\n{table(rows)}\n")
    print(json.dumps({"threads": plan.threads, "goals": rows}))


if __name__ == "__main__":
    main(sys.argv[1:])
