"""Completion: scripts that let a shell complete commands, flags and their values.

Made of the settings models, so that they know every flag. Install, for bash:
`source <(logitd completion bash)`.
"""

import shlex
from collections.abc import Callable, Mapping

from pydantic_settings import BaseSettings

from logitd.service.cli.arguments.flags import flags_of, known_words

Commands = Mapping[str, type[BaseSettings]]
OTHERS = ("help", "completion", "version")


def bash(commands: Commands) -> str:
    """A function for bash: the choices of the flag before, else flags, else files."""
    cases = []
    for name, settings in commands.items():
        values = [
            f"        {name}:{word}) words={shlex.quote(' '.join(flag.choices))} ;;"
            for flag in flags_of(settings)
            if flag.choices
            for word in flag.words
        ]
        flags = shlex.quote(" ".join(known_words(settings)))
        cases += [*values, f"        {name}:*) [[ $now == -* ]] && words={flags} ;;"]
    names = " ".join([*commands, *OTHERS])
    return "\n".join(
        [
            "_logitd() {",
            '    local now="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"',
            '    local command="${COMP_WORDS[1]}" words=""',
            "    COMPREPLY=()",
            "    if (( COMP_CWORD == 1 )); then",
            f'        COMPREPLY=($(compgen -W "{names}" -- "$now"))',
            "        return",
            "    fi",
            '    case "$command:$before" in',
            f'        help:*) words="{" ".join(commands)}" ;;',
            f'        completion:*) words="{" ".join(SHELLS)}" ;;',
            *cases,
            "    esac",
            '    if [[ -n "$words" ]]; then',
            '        COMPREPLY=($(compgen -W "$words" -- "$now"))',
            "    else",
            '        COMPREPLY=($(compgen -f -- "$now"))',
            "    fi",
            "}",
            "complete -o filenames -F _logitd logitd",
        ]
    )


def zsh(commands: Commands) -> str:
    """bash's, which zsh understands when it is told to."""
    begin = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit"
    return f"{begin}\n{bash(commands)}"


def fish(commands: Commands) -> str:
    """A line for each command and each flag, with its description."""
    names = " ".join([*commands, *OTHERS])
    seen = "__fish_seen_subcommand_from"
    words = {f"not {seen} {names}": names, f"{seen} help": " ".join(commands)}
    words[f"{seen} completion"] = " ".join(SHELLS)
    lines = [f"complete -c logitd -n '{when}' -f -a '{those}'" for when, those in words.items()]
    for name, settings in commands.items():
        for flag in flags_of(settings):
            value = f" -x -a {shlex.quote(' '.join(flag.choices))}" if flag.choices else ""
            value = value or (" -r" if flag.value else "")
            about = _quoted(flag.description)
            lines += [
                f"complete -c logitd -n '__fish_seen_subcommand_from {name}' {_word(word)}{value} "
                f"-d {about}"
                for word in flag.words
            ]
    return "\n".join(lines)


def _word(word: str) -> str:
    return f"-l {word[2:]}" if word.startswith("--") else f"-s {word[1:]}"


def _quoted(text: str) -> str:
    """In fish's single quotes."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SHELLS: Mapping[str, Callable[[Commands], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
