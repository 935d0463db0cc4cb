"""torch.save archives with false metadata are read correctly or refused. They are never read as
other values."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.pt_archive import REPEATED_BYTES
from logitd.model.convert.pt_file import read_pt
from tests.model.convert.theirs import their_model


def state() -> dict[str, torch.Tensor]:
    """Tensors of several sizes and dtypes. Two have the same size, and two share one storage."""
    torch.manual_seed(0)
    shared = torch.randn(40, 30)
    return {
        "embedding": shared,
        "head": shared,
        "part": shared[:7].T,
        "a": torch.randn(16, 16),
        "b": torch.randn(16, 16),
        "half": torch.randn(99).bfloat16(),
        "count": torch.tensor(3),
        "none": torch.empty(0),
    }


def packed_again(path: Path, change: Callable[[str, bytes], bytes], kind: int) -> Path:
    """Change the contents of an archive, and pack it again as a zip program would."""
    with zipfile.ZipFile(path) as old:
        contents = {entry.filename: old.read(entry) for entry in old.infolist()}
    with zipfile.ZipFile(path, "w", kind) as new:
        for name, content in contents.items():
            new.writestr(name, change(name, content))
    return path


def assert_same(loaded: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_repacked_archive_has_the_same_values(kind: int, tmp_path: Path) -> None:
    """Compressed bytes were once read as the values: in bfloat16 most of them are finite, so the
    model was imported."""
    torch.save(state(), tmp_path / "m.pt")
    packed_again(tmp_path / "m.pt", lambda name, content: content, kind)
    assert_same(read_pt(tmp_path / "m.pt"), state())


@given(index=st.integers(0, 4), share=st.floats(0, 0.99))
def test_short_values_do_not_read_into_the_next_file(
    index: int, share: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("short") / "m.pt"
    torch.save(state(), path)

    def cut(name: str, content: bytes) -> bytes:
        return content[: int(len(content) * share)] if name.endswith(f"data/{index}") else content

    packed_again(path, cut, zipfile.ZIP_STORED)
    with pytest.raises(ConvertError, match="damaged"):
        read_pt(path)


@pytest.mark.parametrize("old", [False, True])
def test_shape_larger_than_the_file_is_refused(old: bool, tmp_path: Path) -> None:
    """A file of 2 kB declared 4 TiB, which would have been copied row by row."""
    repeated = {"weight": torch.zeros(1).expand(2**20, 2**20), "bias": torch.zeros(3)}
    path = tmp_path / "m.pt"
    torch.save({"model": repeated}, path, _use_new_zipfile_serialization=not old)
    sentence = r"model\.weight has the shape \(1048576, 1048576\), which takes 4,398,046,511,104 b"
    with pytest.raises(ConvertError, match=sentence):
        read_pt(path)


def test_masks_may_share_storage(tmp_path: Path) -> None:
    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool).expand(32, 1, 64, 64)
    assert mask.numel() < REPEATED_BYTES
    torch.save({"mask": mask}, tmp_path / "m.pt")
    assert_same(read_pt(tmp_path / "m.pt"), {"mask": mask})


def test_file_of_a_real_model_is_read(tmp_path: Path) -> None:
    weights = their_model("llama").state_dict()
    torch.save(weights, tmp_path / "m.pt")
    assert_same(read_pt(tmp_path / "m.pt"), dict(weights))
