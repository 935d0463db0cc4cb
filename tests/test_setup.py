"""`make setup`: the Makefile's rule, with fake interpreters that report any version and log what is
installed.

Real installations of the pinned packages are not tested, because these tests already run in one.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

INTERPRETER = """\
#!{python} -IS
import os, pathlib, shutil, sys
VERSION = {version}
me = pathlib.Path(sys.argv[0])
inside = (me.parent / "pip").exists()
match sys.argv[1:]:
    case ["-c", code]:
        if "import pip" in code and not inside:
            sys.exit("ModuleNotFoundError: No module named 'pip'")
        sys.version_info = (*VERSION, 0)
        sys.modules["pip"] = sys
        exec(code)
    case ["-m", "venv", *flags, folder]:
        if "--clear" in flags:
            shutil.rmtree(folder)
        bin = pathlib.Path(folder, "bin")
        bin.mkdir(parents=True)
        (bin.parent / "pyvenv.cfg").touch()
        shutil.copy(me, bin / "python")
        if {without_pip}:
            sys.exit("ensurepip is not available")
        (bin / "pip").touch()
    case ["-m", "pip" | "uv" as tool, *words] if tool == "uv" or inside:
        with open("installed.log", "a") as log:
            print(tool, *words, file=log)
        if {index_gone} and any(word.startswith("torch==") for word in words):
            sys.exit("dns error")
    case ["-m", "logitd.model.inference.kernels"] if inside:
        pass
    case wrong:
        sys.exit(f"not understood: {{wrong}}")
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with the files that the rule needs, and a search path without a Python."""
    for name in ("Makefile", "requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("make", "sh", "rm", "touch", "getconf"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    return tmp_path


def interpreter(
    clone: Path, version: str, *, without_pip: bool = False, index_gone: bool = False
) -> None:
    """Put a fake Python on the path. If `index_gone`, torch cannot be downloaded."""
    script = clone / "tools" / f"python{version}"
    numbers = tuple(map(int, version.split(".")))
    script.write_text(
        INTERPRETER.format(
            python=sys.executable, version=numbers, without_pip=without_pip, index_gone=index_gone
        )
    )
    script.chmod(0o755)


def make(clone: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # Without the variables of an outer make.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", *words], cwd=clone, capture_output=True, text=True, timeout=60,
        env={**environment, "PATH": str(clone / "tools")},
    )  # fmt: skip


def installed(clone: Path) -> str:
    return (clone / "installed.log").read_text(encoding="utf-8")


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.10", "3.14"])
def test_unsupported_python_is_refused_and_leaves_nothing(clone: Path, version: str) -> None:
    interpreter(clone, version)
    before = set(clone.iterdir())
    done = make(clone, "setup", f"PYTHON=python{version}")
    assert done.returncode == 2
    assert re.search(rf"3\.11 to 3\.13.*python{version} is {version}", done.stderr)
    assert set(clone.iterdir()) == before


@pytest.mark.parametrize("target", ["setup", "serve"])
def test_refusal_names_the_command_that_works(clone: Path, target: str) -> None:
    interpreter(clone, "3.10")
    interpreter(clone, "3.12")
    done = make(clone, target, "PYTHON=python3.10")
    assert f"make {target} PYTHON=python3.12" in done.stderr


def test_missing_python_is_named(clone: Path) -> None:
    done = make(clone, "setup")
    assert done.returncode == 2
    assert re.search(r"3\.11 to 3\.13.*python3 is not", done.stderr)
    assert not (clone / ".venv").exists()


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_supported_python_works(clone: Path, version: str) -> None:
    interpreter(clone, "3.10")
    interpreter(clone, version)
    assert make(clone, "setup", "PYTHON=python3.10").returncode == 2
    done = make(clone, "setup", f"PYTHON=python{version}")
    assert done.returncode == 0, done.stderr
    assert "--require-hashes -r requirements.lock" in installed(clone)
    assert (clone / ".venv" / ".runtime").exists()
    # The second call does nothing.
    before = installed(clone)
    assert make(clone, "setup").returncode == 0
    assert installed(clone) == before


@pytest.mark.parametrize("left", ["another Python", "no pip", "no interpreter", "a dead link"])
def test_unfinished_environments_are_created_again(clone: Path, left: str) -> None:
    """The leftover environment belongs to an unsupported Python, an interrupted setup, or a removed
    interpreter."""
    interpreter(clone, "3.10")
    interpreter(clone, "3.11")
    python = "3.10" if left == "another Python" else "3.11"
    subprocess.run([clone / "tools" / f"python{python}", "-m", "venv", clone / ".venv"], check=True)
    stale = clone / ".venv" / "stale"
    stale.touch()
    bin_ = clone / ".venv" / "bin"
    match left:
        case "no pip":
            (bin_ / "pip").unlink()
        case "no interpreter":
            shutil.rmtree(bin_)
        case "a dead link":
            (bin_ / "python").unlink()
            (bin_ / "python").symlink_to(clone / "nowhere")
    assert make(clone, "setup", "PYTHON=python3.10").returncode == 2
    done = make(clone, "setup", "PYTHON=python3.11")
    assert done.returncode == 0, done.stderr
    assert not stale.exists()


def test_python_without_pip_leaves_nothing_behind(clone: Path) -> None:
    """Debian's Python itself reports that python3-venv is missing."""
    interpreter(clone, "3.11", without_pip=True)
    done = make(clone, "setup", "PYTHON=python3.11")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "ensurepip is not available"
    assert not (clone / ".venv").exists()


@pytest.mark.parametrize(
    ("index", "line"),
    [
        ("", r"^pip .* install --quiet torch=="),
        ("cpu", r"^uv pip install .*--python \.venv/bin/python --torch-backend cpu torch=="),
        ("file:///wheels", r"^pip .* install --quiet --index-url file:///wheels torch=="),
    ],
)
def test_torch_comes_from_the_given_index(clone: Path, index: str, line: str) -> None:
    interpreter(clone, "3.11")
    done = make(clone, "setup", "PYTHON=python3.11", f"TORCH_INDEX={index}")
    assert done.returncode == 0, done.stderr
    assert re.search(line, installed(clone), flags=re.MULTILINE)


@pytest.mark.parametrize("index", ["cpu", "https://example.org/whl", ""])
def test_unreachable_index_of_torch_is_not_fatal(clone: Path, index: str) -> None:
    """The message names the setting for networks with a package mirror."""
    interpreter(clone, "3.11", index_gone=True)
    done = make(clone, "setup", "PYTHON=python3.11", f"TORCH_INDEX={index}")
    assert done.returncode != 0
    assert "dns error" in done.stderr
    assert (f"installed from {index}; to install" in done.stderr) == bool(index)
    interpreter(clone, "3.11")
    shutil.copy(clone / "tools" / "python3.11", clone / ".venv" / "bin" / "python")
    done = make(clone, "setup", "PYTHON=python3.11")
    assert done.returncode == 0, done.stderr


def test_all_files_have_the_same_versions() -> None:
    """The versions in the Makefile, the package and the documents agree."""
    listed = re.search(r"^PYTHONS := (.+)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert listed is not None
    versions = listed[1].split()
    package = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    above = f"3.{int(versions[-1].partition('.')[2]) + 1}"
    assert f'requires-python = ">={versions[0]},<{above}"' in package
    for version in versions:
        assert f"Python :: {version}" in package
    assert f"Python {versions[0]} to {versions[-1]}" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("there", [True, False])
def test_missing_compiler_is_installed(clone: Path, there: bool) -> None:
    interpreter(clone, "3.12")
    if there:
        (clone / "tools" / "g++").symlink_to("/bin/true")
    done = make(clone, "setup", "PYTHON=python3.12")
    assert done.returncode == 0, done.stderr
    assert ("ziglang==" in installed(clone)) is not there
    assert ("no C++ compiler is installed" in done.stdout) is not there
