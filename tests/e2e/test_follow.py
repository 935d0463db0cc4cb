"""A run is trained and served at the same time: each saved checkpoint is served, no request fails,
and none is answered by two checkpoints."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from logitd.model.checkpoint.checkpoint import load_checkpoint
from logitd.model.inference.reference import generate
from logitd.model.inference.sampling.params import SamplingParams
from tests.conftest import MATPLOTLIB
from tests.e2e.server import STARTUP_SECONDS, ServedProcess
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


class Load:
    """Clients that send requests until the block ends, and their replies."""

    def __init__(self, url: str) -> None:
        self.replies: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(url,)) for _ in range(CLIENTS)]

    def steps(self) -> set[int]:
        return {reply["checkpoint"]["step"] for reply in self.replies}

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, url: str) -> None:
        with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
            while not self._stop.is_set():
                response = client.post("/generate", json=BODY)
                if response.status_code == 200:
                    self.replies.append(response.json())
                else:
                    self.failures.append(response.text)


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def expected(run: Path, step: int) -> list[int]:
    """The reference's tokens for a checkpoint."""
    info, gpt = load_checkpoint(
        run / f"step-{step:06d}", device=torch.device("cpu"), dtype=torch.float32
    )
    params = SamplingParams(max_tokens=20, temperature=0, seed=0)
    return generate(gpt, info.tokenizer.encode("the cat"), params)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[ForkedProcess]:
    """A training that has saved its first checkpoint."""
    process = train(tmp_path, 100_000)
    try:
        wait_for(lambda: (tmp_path / "run" / "latest" / "config.json").exists())
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_run_is_served_while_it_trains(training: ForkedProcess, tmp_path: Path) -> None:
    flags = ("run", "--follow", "latest", "--follow-interval", "0.2")
    with ServedProcess(*flags, "--threads", "1", "--dtype", "float32", cwd=tmp_path) as server:
        with Load(server.url) as load:
            wait_for(lambda: len(load.steps()) >= 5 or load.failures)
        training.kill()
        metrics = httpx.get(f"{server.url}/metrics", trust_env=False).text
    assert load.failures == []
    assert 'logitd_reloads_total{model="run",result="refused"} 0.0' in metrics
    right = {step: expected(tmp_path / "run", step) for step in load.steps()}
    assert len({tuple(tokens) for tokens in right.values()}) > 1, "they differ"
    for reply in load.replies:
        assert reply["choices"][0]["token_ids"] == right[reply["checkpoint"]["step"]]
