"""Damaged foreign models are imported, or refused with a message and exit code 1.

Tests run the command itself in this process. No code in a damaged file is run.
"""

import json
import os
import pickle
import shutil
import time
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

from logitd.service.cli.main import run
from tests.model.convert.by_role.scheme import state
from tests.model.convert.by_role.schemes import SCHEMES
from tests.model.convert.by_role.textbook.common import randomized
from tests.model.convert.by_role.textbook.nanogpt import Nano, NanoConfig
from tests.model.convert.test_containers import write_arrays, write_lists, write_llama2c
from tests.model.convert.theirs import save_theirs
from tests.model.convert.vocabulary.test_llama2c import SMALL, llama2c_file
from tests.model.damage import damaged, edited, written
from tests.profiles import examples

pytestmark = pytest.mark.timeout(600)  # for all examples on a busy machine

NAMES = ("vocab.json", "chars.txt", "vocab.tiktoken", "tokenizer.model", "tokenizer.bin")
CANARY = "code-of-the-file-ran"
STOI = {character: token_id for token_id, character in enumerate(" abcdefg\n")}


class Exploding:
    """Creates a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {CANARY}",)


def try_to_import(source: Path, *flags: str) -> int:
    """Run `logitd import` and return its exit code, which must be 0 or 1. An exception fails the
    test."""
    destination = Path("imported")
    shutil.rmtree(destination, ignore_errors=True)
    code = run(["import", str(source), str(destination), *flags])
    assert code in (0, 1)
    assert not Path(CANARY).exists()
    assert destination.exists() == (code == 0)
    return code


def nanogpt(hostile: bool) -> dict[str, Any]:
    """A very small model as nanoGPT saves it."""
    config = NanoConfig(
        vocab_size=len(STOI), block_size=8, n_layer=1, n_head=2, n_embd=8, bias=False
    )
    model = randomized(Nano(config)).state_dict()
    saved = {"model": model, "model_args": asdict(config), "iter_num": 3, "best_val_loss": 2.0}
    return saved | ({"config": Exploding()} if hostile else {"config": {"dataset": "x"}})


def zipped(path: Path, hostile: bool) -> None:
    torch.save(nanogpt(hostile), path)


def legacy(path: Path, hostile: bool) -> None:
    torch.save(nanogpt(hostile), path, _use_new_zipfile_serialization=False)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def fuzz(file: Path, contents: SearchStrategy[bytes], full: int, source: Path, *flags: str) -> None:
    """Write each drawn content to `file`, which is part of `source`, and import `source`."""

    @given(contents)
    @settings(max_examples=examples(full, fast=12), suppress_health_check=[HealthCheck.too_slow])
    def refused_or_imported(raw: bytes) -> None:
        file.write_bytes(raw)
        try_to_import(source, *flags)

    refused_or_imported()


@pytest.mark.hypothesis
@pytest.mark.parametrize("hostile", [False, True], ids=["plain", "hostile"])
@pytest.mark.parametrize("save", [zipped, legacy])
def test_damaged_pickled_file_is_imported_or_refused(
    save: Callable[[Path, bool], None], hostile: bool, tmp_path: Path
) -> None:
    source = tmp_path / "ckpt.pt"
    save(source, hostile)
    whole = source.read_bytes()
    assert try_to_import(source, "--tokenizer", "none") == hostile
    # The import once failed with Python's message about the escape.
    source.write_bytes(whole.replace(b"system", b"sys\\em"))
    try_to_import(source, "--tokenizer", "none")
    fuzz(source, damaged(whole), 150, source, "--tokenizer", "none")


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", ["weights.npz", "weights.json", "version0.bin", "version1.bin"])
def test_damaged_container_is_imported_or_refused(name: str, tmp_path: Path) -> None:
    source = tmp_path / name
    tensors = state((SCHEMES["llama2.c"] if name.endswith("bin") else SCHEMES["book"]).model())
    if name.endswith("bin"):
        write_llama2c(source, tensors, int(name[7]), shared=True)
    else:
        (write_arrays if name.endswith("npz") else write_lists)(source, tensors)
    flags = ("--n-head", "4", "--activation", "relu", "--score-scale", "head_dim",
             "--norm-position", "pre", "--final-norm", "--tokenizer", "none")  # fmt: skip
    used = flags[-2:] if name.endswith("bin") else flags
    whole = source.read_bytes()
    assert try_to_import(source, *used) == 0
    fuzz(source, damaged(whole), 100, source, *used)


@pytest.mark.hypothesis
@pytest.mark.parametrize("hostile", [False, True], ids=["plain", "hostile"])
def test_damaged_pickled_vocabulary_is_imported_or_refused(hostile: bool, tmp_path: Path) -> None:
    zipped(tmp_path / "ckpt.pt", False)
    itos = {token_id: character for character, token_id in STOI.items()}
    meta: dict[str, Any] = {"vocab_size": len(STOI), "stoi": STOI, "itos": itos}
    whole = pickle.dumps(meta | ({"more": Exploding()} if hostile else {}))
    (tmp_path / "meta.pkl").write_bytes(whole)
    assert try_to_import(tmp_path / "ckpt.pt") == hostile
    fuzz(tmp_path / "meta.pkl", damaged(whole), 150, tmp_path / "ckpt.pt")


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", NAMES)
def test_damaged_vocabulary_file_is_imported_or_refused(name: str, tmp_path: Path) -> None:
    zipped(tmp_path / "ckpt.pt", False)
    whole = {
        "vocab.json": written(STOI),
        "chars.txt": "\n".join("abcdefghi").encode(),
        "vocab.tiktoken": b"YQ== 0\nYg== 1\n",
        "tokenizer.bin": llama2c_file(SMALL),
        "tokenizer.model": b"minbpe v1\n\n0\n97 98\n256 99\n",
    }[name]
    fuzz(tmp_path / name, damaged(whole), 100, tmp_path / "ckpt.pt")


@pytest.mark.hypothesis
def test_edited_vocabulary_is_imported_or_refused(tmp_path: Path) -> None:
    zipped(tmp_path / "ckpt.pt", False)
    document = {"stoi": STOI, "itos": {str(i): text for text, i in STOI.items()}}
    fuzz(tmp_path / "vocab.json", edited(document).map(written), 200, tmp_path / "ckpt.pt")


@pytest.mark.parametrize("largest", [2**31, 2**62, 10**400])
def test_huge_id_is_refused_at_once(
    largest: int, tmp_path: Path, their_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All smaller ids were once counted, which took 23 seconds and gigabytes of memory."""
    zipped(tmp_path / "ckpt.pt", False)
    (tmp_path / "vocab.json").write_bytes(written(STOI | {"z": largest}))
    source = Path(shutil.copytree(their_folder, tmp_path / "theirs"))
    document = json.loads((source / "tokenizer.json").read_bytes())
    document["model"]["vocab"]["z"] = largest
    (source / "tokenizer.json").write_bytes(written(document))
    began = time.process_time()
    assert try_to_import(tmp_path / "ckpt.pt") == 1
    assert try_to_import(source) == 1
    assert time.process_time() - began < 5
    assert "logitd import: " in capsys.readouterr().err


@pytest.fixture(scope="module")
def their_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as transformers saves it."""
    folder = tmp_path_factory.mktemp("theirs") / "theirs"
    save_theirs(folder, "gpt2")
    return folder


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_damaged_hugging_face_folder_is_imported_or_refused(
    name: str, their_folder: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(their_folder, tmp_path / "theirs"))
    whole = (source / name).read_bytes()
    assert try_to_import(source) == 0
    fuzz(source / name, damaged(whole), 100, source)
    if name.endswith("json"):
        fuzz(source / name, edited(json.loads(whole)).map(written), 200, source)


@pytest.mark.parametrize("layers", [2**31, 2**62])
def test_huge_number_of_layers_is_refused_at_once(
    layers: int, their_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The names of all layers were once listed, until the system killed the process."""
    source = Path(shutil.copytree(their_folder, tmp_path / "theirs"))
    document = json.loads((source / "config.json").read_bytes()) | {"n_layer": layers}
    (source / "config.json").write_bytes(written(document))
    saved = nanogpt(hostile=False)
    saved["model_args"]["n_layer"] = layers
    torch.save(saved, tmp_path / "ckpt.pt")
    for path in (source, tmp_path / "ckpt.pt"):
        began = time.process_time()
        assert try_to_import(path, "--tokenizer", "none") == 1
        assert f"its configuration states {layers:,} layers" in capsys.readouterr().err
        assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "architectures", [float("nan"), [float("nan")], 2**63, {"a": 1}, ["\ud800"]]
)
def test_broken_names_of_classes_are_refused(
    architectures: Any,
    their_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Values that JSON cannot represent once caused a traceback. Integers beyond 64 bits and lone
    surrogates were saved in a checkpoint that then could not be loaded."""
    source = Path(shutil.copytree(their_folder, tmp_path / "theirs"))
    document = json.loads((source / "config.json").read_bytes()) | {"architectures": architectures}
    (source / "config.json").write_text(json.dumps(document), encoding="utf-8")
    assert try_to_import(source) == 1
    assert "architectures is not a list of names" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".bin", ".npz", ""])
def test_paths_that_are_not_files_are_refused(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe, zeros, loop = (tmp_path / f"{name}{suffix}" for name in ("pipe", "zeros", "loop"))
    os.mkfifo(pipe)
    zeros.symlink_to("/dev/zero")
    loop.symlink_to(loop)
    for source, sentence in (
        (pipe, "is a pipe (FIFO); expected a regular file"),
        (zeros, "is a device; expected a regular file"),
        (loop, str(loop)),
    ):
        assert try_to_import(source) == 1
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ("--tokenizer", "characters:/dev/zero"),
        ("--tokenizer", "characters:PIPE"),
        ("--tokenizer", "words:PIPE"),
        ("--tokenizer", "PIPE"),
        ("--check", "/dev/zero", "--tokenizer", "characters:TEXT"),
        ("--check", "PIPE", "--tokenizer", "characters:TEXT"),
        ("--map", "PIPE"),
        ("--map", "/dev/zero"),
    ],
    ids=" ".join,
)
def test_flags_with_irregular_files_are_refused(
    flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zipped(tmp_path / "ckpt.pt", False)
    os.mkfifo(tmp_path / "PIPE")
    (tmp_path / "TEXT").write_text("".join(STOI), encoding="utf-8")
    assert try_to_import(tmp_path / "ckpt.pt", *flags) == 1
    assert "PIPE" in (said := capsys.readouterr().err) or "/dev/zero" in said


def test_canary_is_left_by_a_plain_unpickler(tmp_path: Path) -> None:
    """If a pickle's code ran, it would create a file, which the tests above look for. A plain
    unpickler does run the code."""
    pickle.loads(pickle.dumps(Exploding()))
    assert Path(CANARY).exists()


def test_archive_of_several_disks_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python's zipfile raises its own error for such an archive, so the import once ended in a
    traceback."""
    zipped(tmp_path / "ckpt.pt", False)
    raw = bytearray((tmp_path / "ckpt.pt").read_bytes())
    at = raw.rindex(b"PK\x06\x07")  # offset of the zip64 directory, its disk, number of disks
    raw[at + 16 : at + 20] = (2).to_bytes(4, "little")
    (tmp_path / "ckpt.pt").write_bytes(raw)
    assert try_to_import(tmp_path / "ckpt.pt") == 1
    assert "span multiple disks" in capsys.readouterr().err


def test_archive_that_unpacks_to_more_than_memory_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with zipfile.ZipFile(tmp_path / "ckpt.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(200 * 2**20))
    assert (tmp_path / "ckpt.pt").stat().st_size < 2**20
    assert try_to_import(tmp_path / "ckpt.pt") == 1
    assert "would unpack to 209,715,200" in capsys.readouterr().err
