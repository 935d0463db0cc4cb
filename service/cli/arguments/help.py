"""Help: what `logitd --help` and `logitd COMMAND --help` print, made of the settings models.

Groups and examples: `groups.py`.
"""

import shutil
import textwrap
from collections.abc import Iterator, Mapping

from pydantic_settings import BaseSettings

from logitd.service.cli.arguments.flags import Flag, flags_of
from logitd.service.cli.arguments.groups import EXAMPLES, GROUPS

INDENT = " " * 8


def overview(commands: Mapping[str, type[BaseSettings]]) -> str:
    """The commands, a line each."""
    summaries = {name: _summary(settings) for name, settings in commands.items()}
    summaries["completion"] = "Print the completion of commands and flags for bash, zsh or fish."
    lines = [
        textwrap.fill(summary, 100, initial_indent=f"  {name:<10} ", subsequent_indent=" " * 13)
        for name, summary in summaries.items()
    ]
    return "\n".join(
        [
            "logitd: train a GPT, serve every number it computes.",
            "",
            "usage: logitd COMMAND [FLAGS]",
            "",
            *lines,
            "",
            "logitd help COMMAND lists a command's flags. Each flag FLAG can also be set as",
            "LOGITD_FLAG in the environment or in a file .env, for one command alone as",
            "LOGITD_COMMAND_FLAG.",
        ]
    )


def usage(command: str, settings: type[BaseSettings]) -> str:
    """One line: the arguments, and that there are flags."""
    arguments = [flag for flag in flags_of(settings) if not flag.words]
    words = [_name(flag) if flag.required else f"[{_name(flag)}]" for flag in arguments]
    return " ".join([f"usage: logitd {command}", *words, "[FLAGS]"])


def help_of(command: str, settings: type[BaseSettings]) -> str:
    """Everything about a command."""
    width = min(shutil.get_terminal_size().columns, 1000)
    lines = [usage(command, settings), "", _summary(settings), ""]
    if examples := EXAMPLES.get(command):
        longest = max((len(example) for example, note in examples if note), default=0)
        shown = (f"  {example:<{longest}}  {note}".rstrip() for example, note in examples)
        lines += ["examples", *shown, ""]
    lines += _entries(command, settings, width)
    return "\n".join([*lines, "  -h, --help", f"{INDENT}show this"])


def _entries(command: str, settings: type[BaseSettings], width: int) -> Iterator[str]:
    begins = GROUPS.get(command, {})
    first = True
    for flag in flags_of(settings):
        if (title := begins.get(flag.name)) is not None:
            yield from ([title] if first else ["", title])
            first = False
        yield f"  {_head(flag)}"
        yield from textwrap.wrap(
            _text(flag), width, initial_indent=INDENT, subsequent_indent=INDENT,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip


def _head(flag: Flag) -> str:
    if not flag.words:
        return _name(flag)
    return f"{', '.join(flag.words)} {flag.value}".rstrip()


def _text(flag: Flag) -> str:
    notes = []
    if flag.required:
        notes.append("(required)")
    elif flag.default is not None:
        notes.append(f"(default: {flag.default})")
    if flag.words:
        notes.append(f"[env: {flag.variable}]")
    return " ".join([flag.description, *notes])


def _name(flag: Flag) -> str:
    return f"{flag.name.upper()}{' ...' if flag.several else ''}"


def _summary(settings: type[BaseSettings]) -> str:
    return (settings.__doc__ or "").strip().splitlines()[0]
