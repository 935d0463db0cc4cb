"""`python -m tests.faults`: every attack at its long size, and the table of what came out.

`--short` takes the sizes of CI; names choose some of the attacks. The exit code is the number of
attacks that found something.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.faults.attack import Attack, Ground
from tests.faults.attacks import ATTACKS
from tests.zygote import end


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("names", nargs="*", help="part of the names of the attacks to run")
    parser.add_argument("--short", action="store_true", help="the sizes of CI")
    arguments = parser.parse_args()
    chosen = [
        attack
        for attack in ATTACKS
        if not arguments.names or any(name in attack.name for name in arguments.names)
    ]
    if not chosen:
        parser.error("no attack has such a name; there are " + ", ".join(a.name for a in ATTACKS))
    table = Table("attack", "times", "seconds", "expected", "result")
    failures = 0
    for attack in chosen:
        count = attack.short if arguments.short else attack.long
        started = time.monotonic()
        held, result = attempt(attack, count)
        failures += not held
        seconds = f"{time.monotonic() - started:.1f}"
        table.add_row(attack.name, str(count), seconds, attack.expected, result)
        print(f"{attack.name}: {result}", file=sys.stderr)
    end()
    Console().print(table)
    return failures


def attempt(attack: Attack, count: int) -> tuple[bool, str]:
    """Whether it held, and what came out."""
    with tempfile.TemporaryDirectory() as folder, Ground(Path(folder)) as ground:
        try:
            return True, attack.run(ground, count)
        except AssertionError as error:
            return False, f"DID NOT HOLD: {error}"


if __name__ == "__main__":
    sys.exit(main())
