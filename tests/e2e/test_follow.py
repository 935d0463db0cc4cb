"""A run is trained and served at the same time: each saved checkpoint is served, no request fails,
and each request is answered by one checkpoint.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.inference.reference import generate
from logitd.model.inference.sampling.params import SamplingParams
from tests.conftest import MATPLOTLIB
from tests.e2e.server import ServedProcess
from tests.service.serving import at_work, client, eventually
from tests.zygote import ForkedProcess

TEXT = "".join(f"the cat sat on mat {i % 7} and looked at the dog who ran.\n" for i in range(400))
SHAPE = "--vocab-size 300 --n-layer 2 --n-head 2 --n-kv-head 2 --head-dim 16 --d-model 32 --d-ff 64"
PACE = "--context-length 64 --batch-size 8 --eval-batches 2 --eval-every 40 --sample-every 100000"
SAVES = "--checkpoint-every 40 --keep 100 --threads 1 --data text.txt --out run"
TRAIN = ("train", *SHAPE.split(), *PACE.split(), *SAVES.split())
BODY = {"prompt": "the cat", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
CLIENTS = 4


def train(folder: Path, steps: int, *flags: str) -> ForkedProcess:
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    command = (*TRAIN, "--steps", str(steps), *flags)
    with (folder / "log").open("ab") as log:
        return ForkedProcess(
            command, stdout=log.fileno(), stderr=log.fileno(), cwd=folder, without=[MATPLOTLIB]
        )


def step_of(reply: dict[str, Any]) -> int:
    step: int = reply["checkpoint"]["step"]
    return step


def expected(run: Path, step: int) -> list[int]:
    """Tokens that the reference implementation generates with the checkpoint of a step."""
    info, gpt = load_checkpoint(
        run / f"step-{step:06d}", device=torch.device("cpu"), dtype=torch.float32
    )
    params = SamplingParams(max_tokens=20, temperature=0, seed=0)
    return generate(gpt, info.tokenizer.encode("the cat"), params)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[ForkedProcess]:
    """A training run that has saved its first checkpoint."""
    process = train(tmp_path, 100_000)
    try:
        eventually(lambda: (tmp_path / "run" / "latest" / "config.json").exists())
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_run_is_served_while_it_trains(training: ForkedProcess, tmp_path: Path) -> None:
    flags = ("run", "--follow", "latest", "--follow-interval", "0.2")
    with ServedProcess(*flags, "--threads", "1", "--dtype", "float32", cwd=tmp_path) as server:
        replies: list[dict[str, Any]] = []

        def ask(_: int) -> None:
            response = http.post("/generate", json=BODY)
            assert response.status_code == 200, response.text
            replies.append(response.json())

        with client(server.url) as http:
            with at_work(ask, CLIENTS):
                eventually(lambda: len({step_of(reply) for reply in replies}) >= 5)
            training.kill()
            metrics = http.get("/metrics").text
    assert 'logitd_reloads_total{model="run",result="refused"} 0.0' in metrics
    steps = {step_of(reply) for reply in replies}
    right = {step: expected(tmp_path / "run", step) for step in steps}
    assert len({tuple(tokens) for tokens in right.values()}) > 1, "they differ"
    for reply in replies:
        assert reply["choices"][0]["token_ids"] == right[step_of(reply)]
