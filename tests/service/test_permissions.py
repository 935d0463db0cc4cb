"""Who may read what is written, and what is said to those who may not.

A container's user is often not the one who trained. Here: checkpoints, adapters, runs and exports,
by their commands. Not here: what is extracted.
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
    """A working directory without somebody's .env."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=[0o022, 0o002, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    try:
        yield request.param
    finally:
        os.umask(before)


def modes(folder: Path) -> dict[str, str]:
    """Of everything below a folder and of itself, links aside."""
    every = [folder, *sorted(folder.rglob("*"))]
    return {str(path): oct(path.stat().st_mode & 0o777) for path in every if not path.is_symlink()}


def expected(folder: Path, umask: int) -> dict[str, str]:
    return {name: oct((0o777 if Path(name).is_dir() else 0o666) & ~umask) for name in modes(folder)}


def test_what_training_writes_is_for_whom_the_umask_says(umask: int, tmp_path: Path) -> None:
    """Checkpoints, shards, the trainer's state and the lock; adapters, and what `merge` makes."""
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


def test_what_is_converted_is_for_whom_the_umask_says(umask: int, tmp_path: Path) -> None:
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
# Root may read everything; without its capabilities it is a user like others.
header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None).capset(header, none) == 0
for arguments in json.loads(sys.argv[1]):
    print(run(arguments), "|", file=sys.stderr)
"""


def test_what_may_not_be_read_is_said_in_a_sentence(checkpoint_path: Path, tmp_path: Path) -> None:
    """Which file it is, and what its owner can do."""
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
        verb = "entered" if file == "" else "read"
        sentence = (
            f"{path / file} may not be {verb} by this user: chmod a+{wanted} {path / file}, "
            "as its owner"
        )
        for command in (
            ["serve", "--port", "0", "--checkpoint"],
            ["inspect"],
            ["generate", "a", "--checkpoint"],
            ["eval"],
            ["export", str(path), str(tmp_path / "exported")],
        ):
            given = command if command[0] == "export" else [*command, str(path)]
            commands.append(given)
            sentences.append(sentence)
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
