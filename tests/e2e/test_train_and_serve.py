"""The commands that lead from a text to a trained checkpoint and to served numbers."""

import io
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.inference import reference
from logitd.model.inference.sampling.distribution import log_softmax
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.transformer.gpt import GPT
from logitd.service.cli import main as cli
from tests.conftest import MATPLOTLIB
from tests.e2e.server import ServedProcess
from tests.zygote import completed

TEXT = "".join(
    f"the cat sat on mat {i % 7} and looked at the dog who ran over the hill – “far”, it said.\n"
    for i in range(300)
)
SHAPE = "--n-layer 2 --n-head 2 --n-kv-head 2 --head-dim 16 --d-model 32 --d-ff 64"
ON = "--data text.txt --out run --vocab-size 300 --threads 1 --sample-every 1000 --sample-tokens 8"
LENGTH = "--context-length 64 --batch-size 8 --steps 40 --eval-every 20 --eval-batches 2"
SERVED = ("run", "--threads", "1", "--dtype", "float32")
PROMPT = "the cat"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run."""
    folder = tmp_path_factory.mktemp("e2e")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    flags = (*ON.split(), *SHAPE.split(), *LENGTH.split())
    done = completed(["train", *flags], cwd=folder, without=[MATPLOTLIB])
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("serve it:  logitd serve run")
    return folder / "run"


@pytest.fixture(scope="module")
def trained(run: Path) -> tuple[CheckpointInfo, GPT]:
    return load_checkpoint(run / "best", device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="module")
def client(run: Path) -> Iterator[httpx.Client]:
    """A client of `logitd serve run`. The server is started as the trainer suggests, but in
    float32, so that its numbers match the reference numbers."""
    with (
        ServedProcess(*SERVED, cwd=run.parent) as process,
        httpx.Client(base_url=process.url, trust_env=False, timeout=60) as http,
    ):
        yield http


def generate(client: httpx.Client, **fields: Any) -> Any:
    response = client.post("/generate", json={"prompt": PROMPT, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_replies_name_the_run(client: httpx.Client, run: Path) -> None:
    config = json.loads((run / "best" / "config.json").read_text(encoding="utf-8"))
    reply = generate(client, max_tokens=1)
    assert reply["checkpoint"] == {
        "name": "run",
        "step": config["training"]["step"],
        "val_loss": config["training"]["val_loss"],
        "weights_sha256": config["files"]["model.safetensors"],
    }
    info = client.get("/info").json()
    assert info["config"] == config["model"]
    assert info["training"] == config["training"]
    assert info["checkpoint"]["val_loss"] < 3, "it learned"


def test_served_numbers_are_those_of_the_trained_model(
    client: httpx.Client, trained: tuple[CheckpointInfo, GPT]
) -> None:
    checkpoint, gpt = trained
    ids = checkpoint.tokenizer.encode(PROMPT)
    params = SamplingParams(max_tokens=30, seed=4, temperature=0.9, top_p=0.95)
    (choice,) = generate(client, max_tokens=30, seed=4, temperature=0.9, top_p=0.95,
                         ignore_eos=True)["choices"]  # fmt: skip
    assert choice["token_ids"] == reference.generate(gpt, ids, params)
    text = checkpoint.tokenizer.decode(choice["token_ids"])
    assert choice["text"] == text.rstrip("\ufffd"), "a cut character at the end is left out"
    body = {"prompt": TEXT[:80], "positions": "all"}
    response = client.post("/logits", json=body, headers={"Accept": "application/x-npy"})
    rows = np.load(io.BytesIO(response.content))
    plain = gpt(torch.tensor([checkpoint.tokenizer.encode(TEXT[:80])])).logits[0]
    assert np.abs(rows - plain.numpy()).max() < 1e-4


def test_trained_model_reproduces_its_text(
    client: httpx.Client, trained: tuple[CheckpointInfo, GPT]
) -> None:
    """According to the served numbers, a token of the text costs far fewer nats than a random
    guess."""
    ids = trained[0].tokenizer.encode(TEXT[:100])
    body = {"prompt": ids, "positions": "all"}
    (prompt,) = client.post("/logits", json=body).json()["prompts"]
    costs = [
        -log_softmax(np.array(row))[i] for row, i in zip(prompt["logits"], ids[1:], strict=False)
    ]
    assert np.mean(costs) < 0.6 * math.log(300)


def test_generate_command_agrees_with_the_server(
    client: httpx.Client, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--seed", "4", "--max-tokens", "40", "--threads", "1", "--dtype", "float32")
    assert cli.run(["generate", PROMPT, "--checkpoint", str(run / "best"), *flags]) == 0
    reply = generate(client, seed=4, max_tokens=40, temperature=0.8, echo=True)
    assert capsys.readouterr().out == reply["choices"][0]["text"]


def test_classroom_model_is_served(tmp_path: Path) -> None:
    """The model is decoder-8x64. It has post-LN, sinusoidal positions, and a context of 16 tokens,
    which is shorter than a cache block."""
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    flags = "--preset decoder-8x64 --data text.txt --out run --vocab-size 300 --threads 1 --steps 4"
    command = ["train", *flags.split(), "--sample-tokens", "4"]
    completed(command, cwd=tmp_path, without=[MATPLOTLIB]).check_returncode()
    info, gpt = load_checkpoint(
        tmp_path / "run" / "best", device=torch.device("cpu"), dtype=torch.float32
    )
    prompt = info.tokenizer.encode(PROMPT)
    params = SamplingParams(max_tokens=16 - len(prompt), seed=0, temperature=0)
    with (
        ServedProcess(*SERVED, cwd=tmp_path) as process,
        httpx.Client(base_url=process.url, trust_env=False, timeout=60) as http,
    ):
        reply = generate(http, temperature=0, ignore_eos=True)
    assert reply["choices"][0]["token_ids"] == reference.generate(gpt, prompt, params)


@pytest.mark.slow
@pytest.mark.usefixtures("run")  # starts the process from which later ones are forked
def test_minutes_hold_next_to_busy_programs(tmp_path: Path) -> None:
    """A run with `--minutes 1` once took more than two minutes, and two thirds of that time were
    spent generating the sample texts of a single step."""
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    spin = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(spin) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        began = time.monotonic()
        flags = ["--minutes", "1", "--data", "text.txt", "--out", "run"]
        done = completed(["train", *flags], cwd=tmp_path, without=[MATPLOTLIB])
        took = time.monotonic() - began
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert done.returncode == 0, done.stderr
    assert 48 < took < 72
    records = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    reports = [record for record in map(json.loads, records) if record["kind"] == "train"]
    assert reports[-1]["step"] > 10
    assert (reports[-1]["done"], reports[-1]["learning_rate"]) == (1, 0)
