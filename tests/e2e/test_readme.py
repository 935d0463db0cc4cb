"""Curl lines and Python blocks of the documents, run against a server with the bundled checkpoint.

tests/test_documents.py checks terminal commands, and tests/service/cli/commands runs some of them.
"""

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.device import use_threads
from logitd.model.llm import LLM
from logitd.model.transformer.gpt import GPT
from tests.e2e.server import ServedProcess
from tests.model.inference.served import forward_as_served

ROOT = Path(__file__).parent.parent.parent
BUNDLED = ROOT / "checkpoints" / "python-small"
DOCUMENTS = [ROOT / name for name in ("README.md", "service/README.md", "service/operate.md")]
ADDRESS = "127.0.0.1:8000"


def blocks(document: Path, language: str) -> list[str]:
    text = document.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def curl_lines(document: Path) -> list[str]:
    """The curl commands of a document, including commands that continue on the next line after a
    backslash or within quotation marks."""
    commands = []
    for block in blocks(document, "sh"):
        lines = iter(block.replace("\\\n", " ").splitlines())
        for line in lines:
            command = line
            while command.count("'") % 2:
                command += "\n" + next(lines)
            commands.append(command)
    return [command for command in commands if command.startswith("curl ")]


CURL_LINES = [
    pytest.param(line, id=f"{document.relative_to(ROOT)}-{index}")
    for document in DOCUMENTS
    for index, line in enumerate(curl_lines(document))
]
PYTHON_BLOCKS = [
    pytest.param(block, id=f"{document.relative_to(ROOT)}-{index}")
    for document in DOCUMENTS
    for index, block in enumerate(blocks(document, "python"))
]


@pytest.fixture(scope="module")
def server() -> Iterator[ServedProcess]:
    with ServedProcess() as process:
        yield process


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A writable folder with the checkpoints, and with a user's own model.py and service.py, which
    must not be imported in place of ours."""
    (tmp_path / "checkpoints").symlink_to(BUNDLED.parent)
    for file in ("model.py", "service.py"):
        (tmp_path / file).write_text("raise SystemExit('the wrong module was imported')\n")
    return tmp_path


def test_documents_have_commands() -> None:
    assert len(CURL_LINES) >= 6
    assert len(PYTHON_BLOCKS) >= 2


@pytest.mark.parametrize("command", CURL_LINES)
def test_curl_lines_work(command: str, server: ServedProcess, here: Path) -> None:
    found = set(here.iterdir())
    done = subprocess.run(
        ["bash", "-c", "set -o pipefail; " + command.replace(ADDRESS, server.address)],
        cwd=here,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ('{"error"' in done.stdout) == ("refused" in command)
    if "/metrics" in command:
        assert "logitd_" in done.stdout
    elif '"stream": true' in command:
        assert done.stdout.endswith("data: [DONE]\n\n")
    elif " -o " in command:
        assert set(here.iterdir()) - found
    else:
        assert json.loads(done.stdout)


@pytest.mark.parametrize("block", PYTHON_BLOCKS)
def test_python_blocks_work(block: str, server: ServedProcess, here: Path) -> None:
    script = here / "block.py"
    script.write_text(block.replace(ADDRESS, server.address), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script], cwd=here, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.fixture(scope="module")
def model(server: ServedProcess) -> Iterator[tuple[GPT, LLM]]:
    """The served model, loaded twice: as a GPT in the server's dtype, and as an LLM with as many
    threads as the server."""
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http:
        info = http.get("/info").json()
    cpu, dtype = torch.device("cpu"), getattr(torch, info["dtype"])
    gpt = load_checkpoint(BUNDLED, device=cpu, dtype=dtype)[1]
    with LLM(BUNDLED, device="cpu", threads=info["threads"]) as llm:
        yield gpt, llm


@pytest.mark.parametrize("tokens", [3, 32, pytest.param(300, marks=pytest.mark.slow)])
def test_numbers_equal_the_models_to_the_bit(
    server: ServedProcess, model: tuple[GPT, LLM], tokens: int
) -> None:
    """The server uses the dtype and the decoder that it chooses on this machine."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    gpt, llm = model
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http:
        threads = http.get("/info").json()["threads"]
        ids = http.post("/tokenize", json={"prompt": text}).json()["tokens"][:tokens]
        reply = http.post(
            "/logits",
            json={"prompt": ids, "positions": "all"},
            headers={"Accept": "application/x-npy"},
        )
    served = np.load(io.BytesIO(reply.content))
    use_threads(threads)
    own = forward_as_served(gpt, torch.tensor(ids)).logits[0].float().numpy()
    in_process = llm.logits(ids)
    assert served.shape == (tokens, 2048)
    assert np.array_equal(served, own)
    assert np.array_equal(served, in_process)
