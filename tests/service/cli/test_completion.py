"""Shell completion, tested in each installed shell."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from logitd.service.cli.main import COMPLETE, run
from tests.service.cli.parsed import SETTINGS, words_of

SHELLS = ("bash", "zsh", "fish")
OFFERED = {
    "logitd se": ["serve"],
    "logitd e": ["eval", "extract", "export"],
    "logitd serve --quantize ": ["none", "int8", "int4"],
    "logitd serve --quantize n": ["none"],
    "logitd serve --served": ["--served-model-name"],
    "logitd train --no-resu": ["--no-resume"],
    "logitd help ex": ["extract", "export"],
    "logitd completion ": ["bash", "zsh", "fish"],
    "logitd serve mine": ["mine-of-tuesday"],
    "logitd serve --validation-text mine": ["mine-of-tuesday"],
}
"""Command lines, each with the words that every shell suggests to complete it."""


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with the program (for the search path), a completion script for each shell, and a
    path to complete."""
    (tmp_path / "mine-of-tuesday").mkdir()
    program = tmp_path / "bin" / "logitd"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m logitd "$@"\n')
    program.chmod(0o755)
    for shell in SHELLS:
        assert run(["completion", shell]) == 0
        (tmp_path / shell).write_text(capsys.readouterr().out)
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    root = str(Path(__file__).parents[3])
    return {"PATH": path, "PYTHONPATH": root, "TERM": "dumb", "HOME": str(folder / "home")}


def at_a_terminal(folder: Path, shell: list[str], typed: list[str]) -> list[str]:
    """The output of a shell after each of these key sequences. Completion is enabled."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        shell, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment(folder),
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    try:
        setup = "autoload -U compinit; compinit; " if shell[0] == "zsh" else ""
        os.write(ours, f"{setup}PS1='rea''dy> '; COLUMNS=200; source ./{shell[0]}\n".encode())
        until(ours, b"ready> ")
        outputs = []
        for keys in typed:
            # The shell reads the rest after it has answered the tabulator.
            os.write(ours, keys.encode() + b"\x15echo 'the ''end'\n")
            outputs.append(until(ours, b"the end\r.*ready> ").decode())
        return outputs
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def until(descriptor: int, pattern: bytes) -> bytes:
    """Read until a pattern has arrived."""
    read, deadline = b"", time.monotonic() + 60
    while not re.search(pattern, read, re.DOTALL):
        assert time.monotonic() < deadline, read
        if select.select([descriptor], [], [], 1)[0]:
            read += os.read(descriptor, 65536)
    return read


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_shells_at_a_terminal_offer_words(shell: str, folder: Path) -> None:
    """Type a line and press Tab, which bash needs twice to show a list. This test covers every
    other line of OFFERED; `test_fish_offers_words` covers the rest."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    flags = {"bash": ["--norc", "-i"], "zsh": ["-f", "-i"]}[shell]
    tabs = "\t\t" if shell == "bash" else "\t"
    lines = list(OFFERED)[::2]
    outputs = at_a_terminal(folder, [shell, *flags], [f"{line}{tabs}" for line in lines])
    for line, output in zip(lines, outputs, strict=True):
        offered = OFFERED[line]
        if len(offered) == 1:  # it was inserted into the line
            assert f"{line.rpartition(' ')[0]} {offered[0]}" in output
        else:
            assert {*offered} <= {*output.split()}
            assert "train" not in output.split()


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_offers_words(folder: Path) -> None:
    lines = list(OFFERED)[1::2]
    asked = "; ".join(f"complete -C '{line}'; echo the end" for line in lines)
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source ./fish; {asked}"],
        capture_output=True, text=True, check=True, cwd=folder, timeout=60, env=environment(folder),
    )  # fmt: skip
    *outputs, rest = done.stdout.split("the end\n")
    assert rest == ""
    for line, output in zip(lines, outputs, strict=True):
        found = [line.split("\t")[0].rstrip("/") for line in output.splitlines()]
        assert sorted(found) == sorted(OFFERED[line])


@pytest.mark.parametrize("command", SETTINGS)
def test_all_flags_are_offered(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All shells get their suggestions from the program, so the test asks the program."""
    asked = {"COMP_WORDS": f"logitd {command} -", "COMP_CWORD": "2"}
    for name, value in {**asked, COMPLETE: "bash_complete"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=r"^0$"):
        run([])
    out, err = capsys.readouterr()
    assert err == ""
    assert set(words_of(command)) <= {line.partition(",")[2] for line in out.splitlines()}


@pytest.mark.parametrize("arguments", [[], ["tcsh"], ["bash", "zsh"]])
def test_other_shells_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", *arguments]) == 2
    assert "bash" in capsys.readouterr().err
