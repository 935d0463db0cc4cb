"""The kernels are built once for each target and each version of their sources. If they cannot be
built, the error states the reason."""

import os
import platform
import shutil
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from logitd.model.inference.kernels.cpu import library, prebuild
from logitd.model.inference.kernels.cpu.library import (
    KernelsUnavailable,
    TargetRefused,
    build_kernels,
    load_library,
    prebuilt_path,
)
from logitd.model.inference.kernels.cpu.targets import (
    TARGETS,
    Target,
    runnable,
    target_named,
    targets_of,
)
from logitd.model.inference.options import TargetName
from logitd.model.processor import processor_features
from tests.model.conftest import LESSER


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "logitd"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources of a library that takes almost no time to compile."""
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
def test_library_is_built_once(cache: Path, sources: Path) -> None:
    lines: list[str] = []
    first = load_library(lines.append)
    assert (first.functions.answer(), first.description) == (42, "this processor, compiled now")
    assert len(lines) == 1
    (built,) = cache.iterdir()
    written = built.stat().st_mtime_ns
    again = load_library(lines.append)
    assert (again.functions.answer(), again.description) == (42, "this processor, compiled before")
    assert len(lines) == 1
    assert built.stat().st_mtime_ns == written
    (sources / "decoder.cpp").write_text('extern "C" int answer() { return 43; }\n')
    assert load_library(lines.append).functions.answer() == 43
    assert len(lines) == 2


@pytest.mark.usefixtures("compiler", "cache", "sources")
def test_second_caller_waits_for_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert [done.result().functions.answer() for done in (first, second)] == [42, 42]
    assert len(lines) == 1


@pytest.mark.usefixtures("compiler", "cache")
def test_compile_error_is_reported(sources: Path) -> None:
    (sources / "decoder.cpp").write_text("this is not C++\n")
    with pytest.raises(KernelsUnavailable, match="error"):
        load_library()


@pytest.mark.usefixtures("cache", "sources")
def test_compiler_that_does_not_finish_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "c++"
    slow.write_text('#!/bin/sh\n[ "$1" = --version ] || exec sleep 60\n')
    slow.chmod(0o755)
    monkeypatch.setenv("CXX", str(slow))
    monkeypatch.setattr(library, "BUILD_SECONDS", 0.1)
    with pytest.raises(KernelsUnavailable, match=r"0\.1 s"):
        load_library()


@pytest.mark.usefixtures("cache", "sources")
def test_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelsUnavailable, match="compiler"):
        load_library()


@pytest.mark.usefixtures("cache", "sources")
def test_missing_compiler_is_replaced_by_the_packaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ziglang", reason="`make setup` installs it if there is no compiler")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "ziglang" in library._compiler()
    assert load_library(target="x86-64-v3").functions.answer() == 42


@pytest.mark.usefixtures("compiler", "sources")
def test_folder_of_another_user_is_not_trusted(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library is code: a file that others could have written is not loaded."""
    cache.mkdir(parents=True)
    others = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: others)
    with pytest.raises(KernelsUnavailable, match="folder"):
        load_library()


@pytest.mark.usefixtures("compiler", "sources")
def test_folder_is_private(cache: Path) -> None:
    load_library()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


# Targets


HERE = runnable(platform.machine(), processor_features())
"""Targets that this processor can run."""


@pytest.fixture
def prebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "prebuilt"
    monkeypatch.setattr(library, "PREBUILT", folder)
    monkeypatch.setattr(prebuild, "PREBUILT", folder)
    return folder


@pytest.mark.usefixtures("compiler", "cache", "sources")
@pytest.mark.skipif(not HERE, reason="this processor runs no target")
def test_targets_are_built_in_addition_to_this_processor() -> None:
    lines: list[str] = []
    load_library(lines.append)
    for target in HERE:
        loaded = load_library(lines.append, target=target.name)
        assert loaded.description == f"{target.name}, compiled now"
        assert loaded.features == target.features
    assert lines[1:] == [f"building the native kernels for {one.name}, once" for one in HERE]


@pytest.mark.usefixtures("cache", "sources")
@pytest.mark.parametrize(
    "target", [one for one in TARGETS if one not in HERE], ids=lambda one: one.name
)
def test_target_that_the_processor_cannot_run_is_refused(target: Target) -> None:
    with pytest.raises(TargetRefused, match=f"kernel_target.*{target.name}"):
        load_library(target=target.name)


@pytest.mark.usefixtures("compiler", "sources")
@pytest.mark.skipif(not HERE, reason="this processor runs no target")
def test_prebuilt_library_needs_no_compiler_and_no_cache(
    cache: Path, prebuilt: Path, monkeypatch: pytest.MonkeyPatch, sources: Path
) -> None:
    prebuild.main()
    assert len([*prebuilt.iterdir()]) == len(targets_of(platform.machine()))
    monkeypatch.setenv("CXX", "no-such-compiler")
    best = load_library()
    assert (best.functions.answer(), best.description) == (42, f"{HERE[-1].name}, prebuilt")
    for target in HERE:
        assert load_library(target=target.name).description == f"{target.name}, prebuilt"
    assert not cache.exists()
    (sources / "decoder.cpp").write_text('extern "C" int answer() { return 43; }\n')
    with pytest.raises(KernelsUnavailable, match="compiler"):
        load_library()  # the prebuilt kernels belong to other sources


@pytest.mark.usefixtures("compiler", "cache", "sources")
def test_lesser_prebuilt_target_is_used_if_the_greatest_is_missing(prebuilt: Path) -> None:
    if len(HERE) < 2:
        pytest.skip("this processor runs at most one target")
    prebuilt.mkdir()
    build_kernels(HERE[0], prebuilt_path(HERE[0]))
    assert load_library().description == f"{HERE[0].name}, prebuilt"
    assert load_library(target=HERE[1].name).description == f"{HERE[1].name}, compiled now"


X86_64 = platform.machine() == "x86_64"
USES: dict[TargetName, tuple[set[str], set[str]]] = {
    "x86-64-v2": (set(), {"%ymm0", "%zmm0", "vfmadd"}),
    "x86-64-v3": ({"%ymm0", "vfmadd"}, {"%zmm0"}),
    "x86-64-v4": ({"%zmm0", "vfmadd"}, {"vdpbf16ps", "vpdpbusd"}),
    "x86-64-v4-vnni": ({"%zmm0", "vpdpbusd"}, {"vdpbf16ps"}),
    "x86-64-v4-bf16": ({"%zmm0", "vpdpbusd", "vdpbf16ps"}, {"tileloadd"}),
    "x86-64-v4-amx": ({"%zmm0", "tdpbf16ps", "tdpbsud", "vpdpbusd", "vdpbf16ps"}, set()),
}
"""For each target, strings that its disassembly contains, and strings that it must not contain."""


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.skipif(not X86_64, reason="the targets of other architectures")
@pytest.mark.parametrize("name", USES)
def test_every_target_builds_and_uses_its_instructions(
    name: TargetName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build takes 45 seconds on one core. Targets that other tests run are built with the usual
    flags, and the result is shared. The other targets are built without optimization, which uses
    the same instructions and takes a sixth of the time."""
    if shutil.which("objdump") is None:
        pytest.skip("there is no objdump")
    target = target_named(name)
    if target not in HERE or name not in LESSER:
        monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-O0"))
    path, _ = library._compiled(target, print)
    code = subprocess.run(["objdump", "-d", path], capture_output=True, text=True, check=True)
    present, absent = USES[name]
    assert "<logitd_decode>:" in code.stdout
    for word in present:
        assert word in code.stdout, word
    for word in absent:
        assert word not in code.stdout, word


def arm_compiler() -> list[str]:
    """A command that compiles for 64-bit Arm."""
    if cross := shutil.which("aarch64-linux-gnu-g++"):
        return [cross, "-march=armv8-a"]
    pytest.importorskip("ziglang", reason="no compiler for Arm is installed")
    return [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-gnu", "-mcpu=generic"]


@pytest.mark.slow
def test_portable_spelling_compiles_for_arm(tmp_path: Path) -> None:
    """The library is built without optimization, because it does not run here."""
    built = tmp_path / "kernels.so"
    source = library.SOURCES / library.MAIN_SOURCE
    subprocess.run([*arm_compiler(), *library.FLAGS, "-O0", "-o", built, source], check=True)
    header = built.read_bytes()[:20]
    assert header[:4] == b"\x7fELF"
    assert int.from_bytes(header[18:20], "little") == 183, "AArch64"
