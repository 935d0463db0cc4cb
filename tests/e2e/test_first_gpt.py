"""The commands and Python blocks of TUTORIAL.md, run in order on a small text, with training runs
of a few seconds. Commands that install something are left out.
"""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import ServedProcess
from tests.model.conftest import story
from tests.model.convert.textbook_nanochat import save, save_vocabulary, small
from tests.zygote import completed

pytestmark = pytest.mark.slow

TUTORIAL = Path(__file__).parents[2] / "TUTORIAL.md"
LOGITD = ".venv/bin/logitd "
SHORT = "--steps 16 --n-layer 2 --d-model 32 --vocab-size 300 --context-length 64 --batch-size 8"
SHORT += " --eval-every 8 --checkpoint-every 8 --eval-batches 2 --threads 1 --warmup 4"
"""Replaces the minutes of the tutorial."""
INSTALLS = ("make setup ", ".venv/bin/pip install ")


def blocks() -> list[tuple[str, str]]:
    """The language (python or sh) and the content of each block to run."""
    text = TUTORIAL.read_text(encoding="utf-8")
    return re.findall(r"^```(python|sh)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def commands(block: str) -> list[str]:
    return block.replace("\\\n", " ").strip().splitlines()


@dataclass
class Walk:
    """The state of a walk through the tutorial: its folder, running servers, and the output so
    far."""

    folder: Path
    servers: ExitStack
    ports: dict[str, str] = field(default_factory=dict)
    printed: dict[str, str] = field(default_factory=dict)  # by command, or by the block of Python
    names: dict[str, Any] = field(default_factory=dict)

    def at_its_port(self, text: str) -> str:
        for port, address in self.ports.items():
            text = text.replace(f"127.0.0.1:{port}", address)
        return text

    def run(self, kind: str, block: str) -> None:
        if kind == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(self.at_its_port(block), self.names)
            self.printed[block] = out.getvalue()
        else:
            for command in commands(block):
                if not command.startswith(INSTALLS):
                    self.printed[command] = self._command(command)

    def _command(self, command: str) -> str:
        if command.startswith(f"{LOGITD}serve "):
            return self._serve(shlex.split(command.removeprefix(f"{LOGITD}serve ")))
        if command.startswith(LOGITD):
            words = re.sub(r"--minutes \d+", SHORT, command.removeprefix(LOGITD))
            words = words.replace("~/", f"{self.folder}/")
            done = completed(shlex.split(words), cwd=self.folder)
        else:
            done = subprocess.run(
                ["bash", "-c", "set -o pipefail; " + self.at_its_port(command)],
                cwd=self.folder, capture_output=True, text=True, timeout=300,
            )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _serve(self, words: list[str]) -> str:
        port = "8000"
        if "--port" in words:
            place = words.index("--port")
            port = words[place + 1]
            del words[place : place + 2]
        server = ServedProcess(*words, "--threads", "1", cwd=self.folder)
        self.servers.enter_context(server)
        self.ports[port] = server.address
        return server.output


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    folder = tmp_path_factory.mktemp("clone")
    (folder / "my-text.txt").write_text(story(1200), encoding="utf-8")
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    nanochat = folder / ".cache" / "nanochat"
    save_vocabulary(nanochat)
    save(nanochat / "chatsft_checkpoints" / "d12", small(vocab_size=267))
    with ExitStack() as servers, contextlib.chdir(folder):
        walk = Walk(folder, servers)
        servers.callback(lambda: walk.names["client"].close())
        for kind, block in blocks():
            if "lm-eval run" not in block:
                walk.run(kind, block)
        yield walk


def said(walk: Walk, begins: str) -> str:
    """The output of the only command that begins with `start`."""
    (text,) = [text for command, text in walk.printed.items() if command.startswith(begins)]
    return text


def test_commands_work_as_the_page_says(walked: Walk) -> None:
    assert (walked.folder / "runs" / "mine" / "loss.png").stat().st_size > 1000
    assert (walked.folder / "runs" / "mine" / "samples.txt").exists()
    assert json.loads(said(walked, "tail -n 1"))
    assert json.loads(said(walked, "curl http://127.0.0.1:8000/generate"))["choices"][0]["text"]
    assert json.loads(said(walked, "curl http://127.0.0.1:8000/lens"))
    assert json.loads(said(walked, "curl http://127.0.0.1:8000/attention"))
    assert "bits per byte" in said(walked, f"{LOGITD}eval runs/mine --data")
    early = json.loads(said(walked, "curl http://127.0.0.1:8005/generate"))
    assert early["checkpoint"]["step"] == 16
    answer = json.loads(said(walked, "curl http://127.0.0.1:8003/v1/chat/completions"))
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert "dropout" in said(walked, f"{LOGITD}inspect runs/mine runs/other")
    both = next(text for code, text in walked.printed.items() if "for model in" in code)
    assert [line.split()[0] for line in both.splitlines()] == ["mine", "other"]


def test_transformers_has_the_same_five_tokens(walked: Walk) -> None:
    printed = next(text for code, text in walked.printed.items() if "transformers" in code)
    theirs, ours = re.findall(r"\[.*?\]", printed)
    assert theirs == ours
    assert len(json.loads(ours)) == 5


def test_git_ignores_the_files_of_the_page(walked: Walk) -> None:
    names = [f"{child.name}{'/' * child.is_dir()}" for child in walked.folder.iterdir()]
    with tempfile.TemporaryDirectory() as clone:
        shutil.copy(TUTORIAL.parent / ".gitignore", clone)
        subprocess.run(["git", "init", "--quiet", clone], check=True)
        command = ["git", "-C", clone, "check-ignore", *names]
        ignored = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    assert set(names) - set(ignored.splitlines()) <= {".venv/", ".cache/"}


def test_page_has_the_replaced_commands() -> None:
    lines = [command for kind, block in blocks() if kind == "sh" for command in commands(block)]
    assert sum("--minutes " in line for line in lines) == 3
    assert sum(line.startswith(INSTALLS) for line in lines) == 3
    assert sum("lm-eval run" in line for line in lines) == 1


def test_lm_eval_measures_an_unseen_text(walked: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(walked.folder / "hf"))
    ((_, block),) = [(kind, block) for kind, block in blocks() if "lm-eval run" in block]
    walked.run("sh", block.replace("max_length=256", "max_length=64"))
    printed = next(text for command, text in walked.printed.items() if "lm-eval run" in command)
    value = float(re.search(r"bits_per_byte\D*?([\d.]+)", printed)[1])  # type: ignore[index]
    assert 0 < value < 8
    assert os.environ["HF_HOME"]
