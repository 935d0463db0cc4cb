"""Random damage: a checkpoint loads, or is refused with CheckpointError or DeviceError."""

import json
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitd.model.checkpoint.checkpoint import CARD, CONFIG, RANKS, WEIGHTS, CheckpointError
from logitd.model.device import DeviceError
from logitd.model.text.tokenizer import TokenizerError, parse_ranks
from tests.model.checkpoint.files import load, rehash
from tests.model.damage import damaged, edited, written
from tests.model.factories import save_tiny_checkpoint
from tests.profiles import examples

pytestmark = pytest.mark.timeout(600)  # for all examples on a busy machine

MIB = 2**20


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = save_tiny_checkpoint(tmp_path_factory.mktemp("whole") / "tiny").path
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.fixture(scope="module", autouse=True)
def little_memory() -> Iterator[None]:
    """Make every allocation of a gigabyte or more fail."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 1024 * MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def try_to_load(folder: Path, files: dict[str, bytes], *, hashed: bool) -> None:
    folder.mkdir(exist_ok=True)
    for name, raw in files.items():
        (folder / name).write_bytes(raw)
    if hashed:
        with suppress(ValueError, KeyError, TypeError, AttributeError):  # a section is missing
            rehash(folder)
    with suppress(CheckpointError, DeviceError):
        load(folder)


@pytest.mark.hypothesis
@pytest.mark.parametrize("hashed", [True, False], ids=["hashed", "not hashed"])
@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, RANKS, CARD])
def test_damaged_bytes_are_refused_or_load(
    whole: dict[str, bytes], tmp_path: Path, name: str, hashed: bool
) -> None:
    @given(damaged(whole[name]))
    @settings(max_examples=examples(150, fast=12))
    def refused_or_loaded(raw: bytes) -> None:
        try_to_load(tmp_path / "tiny", whole | {name: raw}, hashed=hashed)

    refused_or_loaded()


@pytest.mark.hypothesis
def test_edited_fields_are_refused_or_load(whole: dict[str, bytes], tmp_path: Path) -> None:
    @given(edited(json.loads(whole[CONFIG])))
    @settings(max_examples=examples(500))
    def refused_or_loaded(document: Any) -> None:
        try_to_load(tmp_path / "tiny", whole | {CONFIG: written(document)}, hashed=False)

    refused_or_loaded()


@pytest.mark.hypothesis
def test_edited_headers_are_refused_or_load(whole: dict[str, bytes], tmp_path: Path) -> None:
    size = int.from_bytes(whole[WEIGHTS][:8], "little")
    header, rest = json.loads(whole[WEIGHTS][8 : 8 + size]), whole[WEIGHTS][8 + size :]

    @given(edited(header))
    @settings(max_examples=examples(300))
    def refused_or_loaded(document: Any) -> None:
        raw = written(document)
        weights = len(raw).to_bytes(8, "little") + raw + rest
        try_to_load(tmp_path / "tiny", whole | {WEIGHTS: weights}, hashed=True)

    refused_or_loaded()


@given(st.binary(max_size=300))
def test_random_ranks_are_refused_or_parsed(raw: bytes) -> None:
    with suppress(TokenizerError):
        parse_ranks(raw, "ranks")


def test_memory_limit_holds() -> None:
    """Without this limit, the tests above would pass however much memory the code allocates."""
    with pytest.raises(MemoryError):
        bytearray(2048 * MIB)
