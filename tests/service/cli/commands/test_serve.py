"""`logitd serve`: the banner and failing starts, in real processes."""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from logitd.model.text.tokenizer import Tokenizer
from logitd.service.cli.commands.serve import print_banner
from logitd.service.models.served import Models
from tests.e2e.server import ServedProcess
from tests.model.factories import (
    byte_tokenizer,
    save_tiny_checkpoint,
    tiny_config,
    tiny_gpt,
    training_record,
)
from tests.service.serving import client, serving
from tests.zygote import completed

ODD_NAME = "模型 [bold]"
"""A directory's name with characters beyond ASCII, and with markup of the library that draws the
banner."""


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    folder = tmp_path_factory.mktemp("serve")
    checkpoint = save_tiny_checkpoint(
        folder / ODD_NAME, training=training_record(step=1234, val_loss=None)
    )
    with ServedProcess(
        *("--checkpoint", str(checkpoint.path), "--threads", "1", "--slots", "3"), cwd=folder
    ) as running:
        yield running


def test_banner_names_the_model_and_the_addresses(process: ServedProcess) -> None:
    banner = process.output[process.output.index("logitd is ready") :]
    rows = dict(re.findall(r"^(\w+) {2,}(.*?) *$", banner, flags=re.MULTILINE))
    rows.pop("load", None)  # this machine may be busy
    assert rows == {
        "checkpoint": f"{ODD_NAME}, step 1,234, validation loss never evaluated",
        "parameters": "52,512",
        "device": rows["device"],
        "dtype": rows["dtype"],
        "decoding": "torch (head_dim is 8, not a multiple of 16 up to 256)",
        "context": "128 tokens",
        "slots": "3 sequences at once, 96.0 KiB of keys and values each",
        "keys": "not required: every client is answered",
        "service": process.url,
        "docs": f"{process.url}/docs",
        "metrics": f"{process.url}/metrics",
    }
    assert re.fullmatch(r"cpu \(.+\), 1 thread", rows["device"])
    assert re.fullmatch(r"float32 \(auto: (no native decoding, .+|.+ bfloat16)\)", rows["dtype"])


def test_banner_names_speculation_and_a_busy_machine(
    checkpoint_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(checkpoint_path, speculate="ngram") as server:
        print_banner(server.state.models, server.port, busy="load 9.4 on 2 cores")
    printed = capsys.readouterr().out
    assert re.search("^load +load 9.4 on 2 cores$", printed, re.MULTILINE)
    assert re.search(r"^decoding +torch, with drafts by ngram *$", printed, re.MULTILINE)


def test_banner_warns_of_untested_cards(
    checkpoint_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(checkpoint_path) as server:
        models = server.state.models
        print_banner(models, server.port)
        [here] = models.served
        elsewhere = replace(here.computation, device="cuda:0 (NVIDIA L4)")
        on_a_card = replace(here, computation=elsewhere)
        banner = capsys.readouterr().out
        print_banner(Models([on_a_card]), server.port)
    assert "unproven" not in banner
    assert re.search(
        r"^unproven +logitd was never tested on this kind of GPU", capsys.readouterr().out, re.M
    )


SAMPLED = "## Samples\n\n```\nIt's\n▸ late\n```\n"
"""A card with a sample."""


@pytest.mark.parametrize(
    ("card", "tokenizer", "context", "prompt", "max_tokens"),
    [
        (SAMPLED, byte_tokenizer(), 128, "It's\n", 40),
        (SAMPLED, byte_tokenizer(), 16, "It's\n", 11),
        (SAMPLED, byte_tokenizer(), 5, [256], 4),
        ("# tiny\n", byte_tokenizer(), 128, [256], 40),
        ("## Samples\n\n```\n0▸ 1\n```\n", Tokenizer.without_text(300), 128, [0], 40),
    ],
)
def test_request_of_the_banner_suits_the_model(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    card: str,
    tokenizer: Tokenizer,
    context: int,
    prompt: str | list[int],
    max_tokens: int,
) -> None:
    gpt = tiny_gpt(tiny_config(vocab_size=tokenizer.vocab_size, context_length=context))
    path = save_tiny_checkpoint(tmp_path / "tiny", gpt, card=card, tokenizer=tokenizer).path
    with serving(path) as server:
        print_banner(server.state.models, server.port)
        line = capsys.readouterr().out.split("try it:\n")[1]
        body = json.loads(shlex.split(line)[-1])
        assert server.client.post("/generate", json=body).status_code == 200
    assert body == {"prompt": prompt, "max_tokens": max_tokens}


def curl_line(process: ServedProcess) -> str:
    """The command after "try it:"."""
    return process.output[process.output.index("try it:") :].splitlines()[1]


def output_of(command: str) -> str:
    return subprocess.run(
        [*shlex.split(command), "--silent", "--noproxy", "*"],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip


def test_links_and_curl_line_of_the_banner_work(process: ServedProcess) -> None:
    with client(process.url) as http:
        for path in ("/docs", "/metrics", "/health"):
            assert http.get(path).status_code == 200
    reply = output_of(curl_line(process))
    assert f'"model":"{ODD_NAME}"' in reply
    assert '"completion_tokens":40' in reply or '"finish_reason":"stop"' in reply


def test_banner_names_the_keys_without_their_values(checkpoint_path: Path, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("LOGITD_API_KEYS=alice=secret-of-alice,ci=secret-of-ci\n")
    flags = ("--checkpoint", str(checkpoint_path), "--threads", "1")
    with ServedProcess(*flags, cwd=tmp_path) as process, client(process.url) as http:
        assert re.search(r"^keys +alice, ci *$", process.output, flags=re.MULTILINE)
        body = {"prompt": "a", "max_tokens": 1}
        assert http.post("/generate", json=body).status_code == 401
        line = curl_line(process)
        curl = line.replace("Bearer KEY", "Bearer secret-of-ci")
        assert curl != line
        assert '"model":"tiny"' in output_of(curl)
        process.wait_for(" key=ci")  # logged after the reply has been sent
        assert "secret" not in process.output


def test_checkpoints_may_have_any_directory_name(process: ServedProcess) -> None:
    with client(process.url) as http:
        response = http.post("/logits", json={"prompt": "a", "model": ODD_NAME})
        assert response.json()["model"] == ODD_NAME
        assert response.headers["x-logitd-name"] == "%E6%A8%A1%E5%9E%8B%20[bold]"
        assert "x-logitd-val-loss" not in response.headers
        assert "server" not in response.headers


def test_metrics_have_no_series_of_creation_times(process: ServedProcess) -> None:
    with client(process.url) as http:
        assert "_created" not in http.get("/metrics").text


def test_damaged_checkpoints_exit_1_with_a_sentence(checkpoint_path: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(checkpoint_path, tmp_path / "damaged"))
    weights = bytearray((path / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (path / "model.safetensors").write_bytes(weights)
    done = completed(["serve", "--port", "0", "--threads", "1", "--checkpoint", str(path)])
    assert done.returncode == 1
    assert done.stdout == "", "no banner"
    assert "Traceback" not in done.stderr
    (error,) = (line for line in done.stderr.splitlines() if "ERROR" in line)
    assert "cannot serve: " in error
    assert "the file was changed, truncated or damaged after saving" in error


def test_paths_that_read_as_names_get_a_hint(tmp_path: Path) -> None:
    (tmp_path / "lr=0.1").mkdir()
    done = completed(["serve", "--port", "0", "lr=0.1"])
    assert done.returncode == 1
    assert "0.1 does not exist" in done.stderr
    assert "if you mean the path lr=0.1, write ./lr=0.1" in done.stderr


def test_server_connects_to_nothing(process: ServedProcess) -> None:
    """The server's only sockets are its listening socket and its clients' connections."""
    with httpx.Client(base_url=process.url, trust_env=False) as http:
        http.get("/docs")
        http.post("/generate", json={"prompt": "a", "max_tokens": 1})
        port = int(process.address.rpartition(":")[2])
        local = _sockets(process.process.pid)
        assert local
        assert {one[0] for one in local} == {port}


def _sockets(pid: int) -> set[tuple[int, int]]:
    """Local and remote ports of the TCP sockets of a process."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        target = str(link.readlink())
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes:
                local, remote = (int(fields[i].rpartition(":")[2], 16) for i in (1, 2))
                found.add((local, remote))
    return found
