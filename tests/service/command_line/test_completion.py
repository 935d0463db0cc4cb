"""Completion, tried in the shells themselves where they are."""

import shutil
import subprocess
from pathlib import Path

import pytest

from service.cli import COMMANDS, run
from service.command_line.completion import SHELLS, bash, fish
from service.command_line.flags import flags_of

COMPLETE = """
source {script}
COMP_WORDS=({words})
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_logitd
printf '%s\\n' "${{COMPREPLY[@]}}"
"""

with_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")


def completed(folder: Path, words: str) -> list[str]:
    """What bash offers for the last of the words."""
    script = folder / "completion.bash"
    script.write_text(bash(COMMANDS))
    done = subprocess.run(
        ["bash", "--norc", "-c", COMPLETE.format(script=script, words=words)],
        capture_output=True, text=True, check=True, cwd=folder, timeout=60,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split()


@with_bash
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("logitd se", ["serve"]),
        ("logitd e", ["eval", "extract", "export"]),
        ("logitd serve --quantize ''", ["none", "int8"]),
        ("logitd serve --quantize i", ["int8"]),
        ("logitd serve --served", ["--served-model-name"]),
        ("logitd train --no-re", ["--no-resume"]),
        ("logitd help ex", ["extract", "export"]),
        ("logitd completion ''", ["bash", "zsh", "fish"]),
        ("logitd serve mine", ["mine-of-tuesday"]),
        ("logitd serve --validation-text mine", ["mine-of-tuesday"]),
    ],
)
def test_bash_offers(words: str, offered: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine-of-tuesday").mkdir()
    assert completed(tmp_path, words) == offered


@with_bash
def test_bash_knows_every_command_and_every_flag(tmp_path: Path) -> None:
    assert set(COMMANDS) < set(completed(tmp_path, "logitd ''"))
    for name, settings in COMMANDS.items():
        words = {word for flag in flags_of(settings) for word in flag.words}
        assert words <= set(completed(tmp_path, f"logitd {name} -"))


def test_fish_knows_every_command_and_every_flag(tmp_path: Path) -> None:
    lines = fish(COMMANDS).splitlines()
    for name, settings in COMMANDS.items():
        assert name in lines[0]
        for flag in flags_of(settings):
            for word in flag.words:
                option = f"-l {word[2:]}" if word.startswith("--") else f"-s {word[1:]}"
                of_command = f"complete -c logitd -n '__fish_seen_subcommand_from {name}' {option} "
                assert sum(line.startswith(of_command) for line in lines) == 1, word


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_finds_no_mistake_in_it(shell: str, tmp_path: Path) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"there is no {shell} here")
    script = tmp_path / "script"
    script.write_text(SHELLS[shell](COMMANDS))
    done = subprocess.run(
        [program, "-n", str(script)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_command_prints_it(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    assert capsys.readouterr() == (f"{SHELLS[shell](COMMANDS)}\n", "")


@pytest.mark.parametrize("arguments", [[], ["tcsh"], ["bash", "zsh"]])
def test_another_shell_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", *arguments]) == 2
    assert capsys.readouterr() == ("", "usage: logitd completion bash|zsh|fish\n")
