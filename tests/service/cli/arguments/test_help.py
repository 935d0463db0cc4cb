"""Help: groups that hold every flag, and examples that can be pasted."""

import re
import shlex

import pytest

from logitd.service.cli.arguments.flags import flags_of
from logitd.service.cli.arguments.groups import EXAMPLES, GROUPS
from logitd.service.cli.arguments.help import help_of, overview, usage
from logitd.service.cli.main import COMMANDS, parse

PASTED = [(command, line) for command, lines in EXAMPLES.items() for line, _ in lines]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_is_in_a_group(command: str) -> None:
    first, *_ = names = [flag.name for flag in flags_of(COMMANDS[command])]
    assert first in GROUPS[command]
    assert GROUPS[command].keys() <= set(names)
    lines = help_of(command, COMMANDS[command]).splitlines()
    for title in GROUPS[command].values():
        assert lines.count(title) == 1


@pytest.mark.parametrize(("command", "line"), PASTED)
def test_an_example_can_be_pasted(command: str, line: str) -> None:
    shown = help_of(command, COMMANDS[command]).splitlines()
    assert sum(re.split(" {2,}", found.strip())[0] == line for found in shown) == 1
    program, name, *rest = shlex.split(line)
    assert (program, name) == ("logitd", command)
    parse(command, rest)


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_it_keeps_to_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for line in help_of("serve", COMMANDS["serve"]).splitlines():
        if line.startswith(" " * 8):
            assert len(line) <= columns or " " not in line.strip(), line


def test_the_overview_has_a_line_for_each_command() -> None:
    lines = overview(COMMANDS).splitlines()
    for command in (*COMMANDS, "completion"):
        assert sum(line.startswith(f"  {command} ") for line in lines) == 1
    assert max(map(len, lines)) <= 100


def test_what_must_be_given_is_in_the_usage() -> None:
    assert usage("merge", COMMANDS["merge"]) == "usage: logitd merge BASE ADAPTER DEST [FLAGS]"
    assert usage("serve", COMMANDS["serve"]) == "usage: logitd serve [CHECKPOINT ...] [FLAGS]"
