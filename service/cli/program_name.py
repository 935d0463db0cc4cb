"""Program name: writes command lines of this program that users can copy from hints and
messages."""

import os
import shlex
import shutil
import sys
from pathlib import Path

NAME = "logitd"


def program_name() -> str:
    """`logitd` if the shell finds this program under that name; otherwise the path by which the
    program was called. A path below the working directory is relative, such as
    `.venv/bin/logitd`."""
    script = Path(sys.argv[0])
    if script.name != NAME:  # `python -m logitd`, or a program that imports logitd
        return NAME
    on_path = shutil.which(NAME)
    if on_path is not None and os.path.realpath(on_path) == os.path.realpath(script):
        return NAME
    if Path.cwd() in script.parents[:3]:
        return str(script.relative_to(Path.cwd()))
    return str(script)


def command(*words: object) -> str:
    """A command line of this program, quoted for a shell."""
    return shlex.join([program_name(), *map(str, words)])
