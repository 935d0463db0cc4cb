"""Permissions of written checkpoints, adapters, runs and exports, and errors for unreadable files.

A container often runs as a different user than the training did.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from logitd.model.training.trainer import train
from logitd.service.cli.main import run
from tests.model.conftest import configuration, story
from tests.model.convert.theirs import save_theirs


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory without a .env."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=[0o002, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    try:
        yield request.param
    finally:
        os.umask(before)


def modes(folder: Path) -> dict[str, str]:
    """Permissions of a folder and of everything below it except links."""
    every = [folder, *sorted(folder.rglob("*"))]
    return {str(path): oct(path.stat().st_mode & 0o777) for path in every if not path.is_symlink()}


def expected(folder: Path, umask: int) -> dict[str, str]:
    return {name: oct((0o777 if Path(name).is_dir() else 0o666) & ~umask) for name in modes(folder)}


def test_training_writes_files_by_the_umask(umask: int, tmp_path: Path) -> None:
    """Checks checkpoints, shards, the trainer's state and lock, adapters, and merged
    checkpoints."""
    story_file = tmp_path / "story.txt"
    story_file.write_text(story(400), encoding="utf-8")
    base, lora = tmp_path / "run", tmp_path / "tuned"
    train(configuration(story_file, base, steps=2, eval_every=2))
    given = {"steps": 2, "eval_every": 2, "from_checkpoint": base / "best", "lora": 2}
    given |= dict.fromkeys(("vocab_size", "n_layer", "n_head", "n_kv_head", "d_model"))
    train(configuration(story_file, lora, **given))
    assert run(["merge", str(base / "best"), str(lora / "best"), str(tmp_path / "merged")]) == 0
    for folder in (base, lora, tmp_path / "merged"):
        assert modes(folder) == expected(folder, umask)
    assert {"state.pt", "model.safetensors", "run.lock"} <= {p.name for p in base.rglob("*")}


def test_conversion_writes_files_by_the_umask(umask: int, tmp_path: Path) -> None:
    save_theirs(tmp_path / "theirs", "llama")
    (tmp_path / "out").mkdir()
    assert run(["import", "theirs", "out/ours"]) == 0
    assert run(["export", "out/ours", "out/hf"]) == 0
    assert run(["export", "out/ours", "out/model.gguf", "--to", "gguf"]) == 0
    assert modes(tmp_path / "out") == expected(tmp_path / "out", umask)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "hf", "model.gguf", "ours",
    ]  # fmt: skip


WITHOUT_PRIVILEGES = """
import ctypes, json, sys
from logitd.service.cli.main import run
# Root may read everything, unless it drops its capabilities.
header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None).capset(header, none) == 0
for arguments in json.loads(sys.argv[1]):
    print(run(arguments), "|", file=sys.stderr)
"""


def test_unreadable_file_is_reported_with_the_fix(checkpoint_path: Path, tmp_path: Path) -> None:
    places = {
        "weights": ("model.safetensors", "r"),
        "config": ("config.json", "r"),
        "ranks": ("tokenizer.tiktoken", "r"),
        "folder": ("", "rx"),
    }
    commands, sentences = [], []
    for name, (file, wanted) in places.items():
        path = tmp_path / name
        shutil.copytree(checkpoint_path, path)
        (path / file).chmod(0)
        verb = "enter" if file == "" else "read"
        where = path / file
        sentence = f"this user may not {verb} {where}: run chmod a+{wanted} {where} as its owner"
        every = [
            ["inspect", str(path)],
            ["serve", "--port", "0", "--checkpoint", str(path)],
            ["generate", "a", "--checkpoint", str(path)],
            ["eval", str(path)],
            ["export", str(path), str(tmp_path / "exported")],
        ]
        chosen = every if name == "weights" else every[:1]
        commands += chosen
        sentences += [sentence] * len(chosen)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PRIVILEGES, json.dumps(commands)],
        capture_output=True, text=True, timeout=100, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    for name in places:
        (tmp_path / name).chmod(0o755)  # so that it can be removed
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    answers = done.stderr.split("|\n")[:-1]
    assert len(answers) == len(commands)
    for given, sentence, answer in zip(commands, sentences, answers, strict=True):
        assert sentence in answer, given
        assert answer.endswith("1 "), given
