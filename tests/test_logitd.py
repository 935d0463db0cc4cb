"""`import logitd`: names of the client and of the `LLM`, each imported when it is first used."""

import subprocess
import sys
from pathlib import Path

import pytest

import logitd
from logitd.model import llm
from logitd.service import client

ROOT = Path(__file__).parent.parent
IN_PROCESS = {"LLM", "SamplingParams", "GenerationError", "InvalidRequest", "LoadError"}

LOADED_BY_CLIENT = """
import sys
import httpx, numpy
others = set(sys.modules)
from logitd import Client
print(*(set(sys.modules) - others))
"""


def test_logitd_exports_the_client_and_the_llm() -> None:
    assert set(logitd.__all__) == IN_PROCESS | set(client.NAMES)
    aliases = {"TokenIds", "OnePrompt", "ManyPrompts", "Prompt", "OneOrManyIds"}
    assert aliases | {"Client", "AsyncStream", "Logits", "Generation"} < set(client.NAMES)
    assert not {"Any", "np", "dataclass", "errors", "BlockingWire"} & set(client.NAMES)
    assert len(logitd.__all__) == len(set(logitd.__all__))
    for name in logitd.__all__:
        assert getattr(logitd, name) is getattr(llm if name in IN_PROCESS else client, name)


def test_logitd_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = logitd.no_such_name


def test_logitd_is_marked_as_typed() -> None:
    """Type checkers look for py.typed in the package that a name is imported from."""
    assert (ROOT / "logitd" / "py.typed").exists()


def test_client_import_loads_httpx_numpy_and_nothing_of_the_server() -> None:
    """The test checks which modules are loaded, because the duration of an import depends on the
    load on the machine."""
    command = [sys.executable, "-c", LOADED_BY_CLIENT]
    names = set(subprocess.check_output(command, cwd=ROOT, text=True).split())
    assert "logitd.service.client" in names
    ours = {"logitd", "numpy"}  # numpy loads parts of itself at their first use
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names | ours
    packages = {"logitd", "logitd.service"}
    assert all(
        name.startswith("logitd.service.client")
        for name in names - packages
        if name.startswith("logitd.")
    )


def test_command_runs_next_to_a_users_own_model_and_service(tmp_path: Path) -> None:
    """tests/e2e/test_readme.py tests importing `LLM` and `Client` in a folder with these files."""
    for file in ("model.py", "service.py"):
        (tmp_path / file).write_text("raise SystemExit('the wrong module was imported')\n")
    command = [sys.executable, "-m", "logitd", "generate", "def ", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
