"""Completion, tried in the shells themselves where they are."""

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from logitd.service.cli.arguments.completion import SHELLS, bash, fish, zsh
from logitd.service.cli.arguments.flags import flags_of
from logitd.service.cli.main import COMMANDS, run

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


OFFERED = pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("logitd se", ["serve"]),
        ("logitd e", ["eval", "extract", "export"]),
        ("logitd serve --quantize ''", ["none", "int8", "int4"]),
        ("logitd serve --quantize n", ["none"]),
        ("logitd serve --served", ["--served-model-name"]),
        ("logitd train --no-re", ["--no-resume"]),
        ("logitd help ex", ["extract", "export"]),
        ("logitd completion ''", ["bash", "zsh", "fish"]),
        ("logitd serve mine", ["mine-of-tuesday"]),
        ("logitd serve --validation-text mine", ["mine-of-tuesday"]),
    ],
)
"""Words on a line, and what every shell offers for the last of them."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder to type in, with something in it that a path may begin with."""
    (tmp_path / "mine-of-tuesday").mkdir()
    return tmp_path


@with_bash
@OFFERED
def test_bash_offers(words: str, offered: list[str], folder: Path) -> None:
    assert completed(folder, words) == offered


def typed_line(words: str) -> str:
    """The words as they are typed before the tabulator; an empty last one is a space."""
    return words.removesuffix("''")


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish here")
@OFFERED
def test_fish_offers(words: str, offered: list[str], folder: Path) -> None:
    (folder / "script").write_text(fish(COMMANDS))
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source script; complete -C '{typed_line(words)}'"],
        capture_output=True, text=True, check=True, cwd=folder, timeout=60,
        env={**os.environ, "HOME": str(folder / "home")},
    )  # fmt: skip
    found = [line.split("\t")[0].rstrip("/") for line in done.stdout.splitlines()]
    assert sorted(found) == sorted(offered)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh here")
@OFFERED
def test_zsh_offers(words: str, offered: list[str], folder: Path) -> None:
    """Typed at a terminal, and the tabulator pressed."""
    (folder / "script").write_text(zsh(COMMANDS))
    line = typed_line(words)
    typed = at_a_terminal(folder, ["zsh", "-f", "-i"], f"{line}\t")
    if len(offered) == 1:  # it stands on the line then
        assert f"{line.rpartition(' ')[0]} {offered[0]}" in typed
    else:
        (shown,) = [row for row in typed.splitlines() if {*offered} <= {*row.split()}]
        assert sorted(shown.split()) == sorted(offered)


def at_a_terminal(folder: Path, shell: list[str], keys: str) -> str:
    """What a shell shows that has sourced `script`, when these keys are pressed."""
    environment = {"PATH": os.environ["PATH"], "TERM": "dumb", "HOME": str(folder / "home")}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        shell, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment,
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    try:
        os.write(ours, b"PS1='rea''dy> '; COLUMNS=200; source script\n")
        until(ours, b"ready> ")
        # What is typed behind the tabulator waits until the shell has answered that.
        os.write(ours, keys.encode() + b"\x15echo 'the ''end'\n")
        return until(ours, b"the end\r").decode()
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def until(descriptor: int, mark: bytes) -> bytes:
    """What can be read up to a mark."""
    read, deadline = b"", time.monotonic() + 60
    while mark not in read:
        assert time.monotonic() < deadline, read
        if select.select([descriptor], [], [], 1)[0]:
            read += os.read(descriptor, 65536)
    return read


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
