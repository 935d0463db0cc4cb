"""Printing text from models and files on a terminal, and command lines to be pasted."""

import ast
import io
import shlex
from pathlib import Path

import pytest

from logitd.service.cli.program_name import command
from logitd.service.cli.terminal import say, visible

COMMANDS = Path(__file__).parents[3] / "service" / "cli" / "commands"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\n\tb é हि 模 \u00a0", "a\n\tb é हि 模 \u00a0"),
        ("\x1b[31m\a\x0e", r"\x1b[31m\x07\x0e"),
        ("a\rb\x7f\x9b0m\x00", r"a\rb\x7f\x9b0m\x00"),
    ],
)
def test_control_characters_are_escaped_on_terminals(text: str, shown: str) -> None:
    assert visible(text) == shown
    terminal, file = Terminal(), io.StringIO()
    say(text, file=terminal)
    say(text, file=file, end="")
    assert terminal.getvalue() == f"{shown}\n"
    assert file.getvalue() == text


def test_commands_print_with_say() -> None:
    """Commands may call `print` only with literals and with JSON, because `print` escapes nothing
    and JSON is escaped already."""
    for path in COMMANDS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
                what = "".join(map(ast.unparse, node.args))
                literal = all(isinstance(each, ast.Constant) for each in node.args)
                assert literal or what.startswith("json.dumps("), f"{path.name}: print({what})"


def test_command_lines_are_quoted_for_a_shell() -> None:
    line = command("serve", Path("runs/o ut=1"), "it's")
    assert shlex.split(line)[1:] == ["serve", "runs/o ut=1", "it's"]
    for path in COMMANDS.glob("*.py"):
        assert "program_name" not in path.read_text(encoding="utf-8").replace(
            "logitd.service.cli.program_name import command", ""
        ), f"{path.name} writes a command line without `command`"
