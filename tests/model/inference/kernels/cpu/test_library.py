"""Building the kernels: once, by content, and a sentence where it cannot be done."""

import os
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from model.inference.kernels.cpu import library
from model.inference.kernels.cpu.library import KernelsUnavailable, load_library


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "logitd"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library that compiles in no time."""
    folder = tmp_path / "native"
    folder.mkdir()
    (folder / "decoder.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(library, "SOURCES", folder)
    return folder


@pytest.fixture
def compiler() -> None:
    try:
        library._compiler()
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.usefixtures("compiler")
def test_it_is_built_once(cache: Path, sources: Path) -> None:
    lines: list[str] = []
    assert load_library(lines.append).answer() == 42
    assert len(lines) == 1
    (built,) = cache.iterdir()
    written = built.stat().st_mtime_ns
    assert load_library(lines.append).answer() == 42
    assert len(lines) == 1
    assert built.stat().st_mtime_ns == written
    (sources / "decoder.cpp").write_text('extern "C" int answer() { return 43; }\n')
    assert load_library(lines.append).answer() == 43
    assert len(lines) == 2


@pytest.mark.usefixtures("compiler", "cache", "sources")
def test_who_comes_while_it_is_built_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    building, build, lines = threading.Event(), library._build, list[str]()

    def slowly(*given: Any) -> None:
        building.set()
        time.sleep(0.2)
        build(*given)

    monkeypatch.setattr(library, "_build", slowly)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(load_library, lines.append)
        assert building.wait(60)
        second = pool.submit(load_library, lines.append)
        assert [first.result().answer(), second.result().answer()] == [42, 42]
    assert len(lines) == 1


@pytest.mark.usefixtures("compiler", "cache")
def test_what_does_not_compile_is_told(sources: Path) -> None:
    (sources / "decoder.cpp").write_text("this is not C++\n")
    with pytest.raises(KernelsUnavailable, match=r"the compiler rejected the kernels: .*error"):
        load_library()


@pytest.mark.usefixtures("cache", "sources")
def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelsUnavailable, match="no C\\+\\+ compiler was found"):
        load_library()


@pytest.mark.usefixtures("cache", "sources")
def test_without_a_compiler_it_takes_the_one_that_is_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ziglang", reason="`make setup` installs it where no compiler is")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "ziglang" in library._compiler()
    assert load_library(processor="x86-64-v3").answer() == 42


@pytest.mark.usefixtures("compiler", "sources")
def test_a_folder_of_somebody_else_is_not_trusted(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library is code: a file that others could have written there is not loaded."""
    cache.mkdir(parents=True)
    others = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: others)
    with pytest.raises(KernelsUnavailable, match="no folder"):
        load_library()


@pytest.mark.usefixtures("compiler", "sources")
def test_the_folder_is_ours_alone(cache: Path) -> None:
    load_library()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
