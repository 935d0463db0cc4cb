"""The command lines of model/convert/README.md, run on a model that a short training script
trains.
"""

import math
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from string import ascii_lowercase

import httpx
import pytest

from tests.e2e.server import ServedProcess
from tests.zygote import completed

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "model" / "convert" / "README.md"

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F

text = open("input.txt").read()
letters = sorted(set(text))
vocab_size = len(letters)
width, block = 32, 16


class Attention(nn.Module):
    def __init__(self, n_head):
        super().__init__()
        self.n_head = n_head
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.register_buffer("mask", torch.ones(block, block).tril())

    def forward(self, x):
        b, t, c = x.shape
        heads = (m(x).view(b, t, self.n_head, -1) for m in (self.q, self.k, self.v))
        q, k, v = (h.transpose(1, 2) for h in heads)
        scores = q @ k.transpose(-2, -1) / (c // self.n_head) ** 0.5
        scores = scores.masked_fill(self.mask[:t, :t] == 0, float("-inf"))
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))


class Layer(nn.Module):
    def __init__(self, n_head):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(n_head)
        self.mlp = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, width))

    def forward(self, x):
        x = x + self.attention(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocab_size, n_head=4, n_layer=2):
        super().__init__()
        self.letters = nn.Embedding(vocab_size, width)
        self.places = nn.Embedding(block, width)
        self.layers = nn.ModuleList(Layer(n_head) for _ in range(n_layer))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocab_size)

    def forward(self, idx):
        x = self.letters(idx) + self.places(torch.arange(idx.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x))


torch.manual_seed(0)
torch.set_num_threads(1)
data = torch.tensor([letters.index(c) for c in text])
model = GPT(vocab_size)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
for step in range(500):
    starts = torch.randint(len(data) - block - 1, (32,)).tolist()
    x = torch.stack([data[i : i + block] for i in starts])
    y = torch.stack([data[i + 1 : i + block + 1] for i in starts])
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.save({"weights": model.state_dict(), "step": 500}, "my_gpt.pt")
with torch.no_grad():
    windows = data[: (len(data) - 1) // block * block].view(-1, block)
    targets = data[1 : len(windows) * block + 1].view(-1, block)
    print(F.cross_entropy(model(windows).flatten(0, 1), targets.flatten()).item())
"""
"""A training script in one file; it prints the loss on its whole text."""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A folder with the script, its text and its output files, and the printed loss."""
    folder = tmp_path_factory.mktemp("desk")
    # Words of three letters and the same three in reverse: something to learn for every part.
    draw = random.Random(1)
    halves = ["".join(draw.choices(ascii_lowercase, k=3)) for _ in range(4000)]
    (folder / "input.txt").write_text(" ".join(half + half[::-1] for half in halves))
    (folder / "my_gpt.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "my_gpt.py"], cwd=folder, capture_output=True, text=True, check=True
    )
    return folder, float(done.stdout)


def lines_of_the_page() -> list[str]:
    """The commands of the page's first part, in order."""
    part = PAGE.read_text(encoding="utf-8").split("## What is recognized")[0]
    blocks = re.findall(r"^```sh\n(.*?)^```", part, flags=re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def run(folder: Path, line: str) -> str:
    """Run a line of the page and return its output."""
    words = shlex.split(line)
    assert words[0] == "logitd", line
    done = completed(words[1:], cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def served(folder: Path, line: str) -> Iterator[httpx.Client]:
    """Start the server of a `logitd serve` line. Yields an HTTP client of that server."""
    with (
        ServedProcess(*shlex.split(line.removeprefix("logitd serve ")), cwd=folder) as server,
        httpx.Client(base_url=server.url, trust_env=False) as client,
    ):
        yield client


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_lines_of_the_page_work(desk: tuple[Path, float]) -> None:
    """The model is imported in four ways: with a text to check, a class, an expression, and flags.
    All imports have the same weights, and their loss matches the loss that the script printed."""
    folder, loss = desk
    lines = lines_of_the_page()
    assert len(lines) == 9, lines
    for line in lines:
        if " serve my_gpt.pt --import" in line:
            continue  # covered by the next test, which answers the open questions first
        if " serve " in line:
            with served(folder, line) as client:
                ids = client.post("/tokenize", json={"prompt": "the quick"}).json()["tokens"]
                answer = client.post("/probs", json={"prompt": ids, "top_k": 2}).json()
                assert answer["prompts"][0]["token_ids"] == ids
                assert len(ids) == len("the quick")
                info = client.get("/info").json()
                if "--run-code" in line:
                    assert info["checkpoint"]["code"] == "my_gpt.py:GPT"
                else:
                    assert "verified" in info["training"]["data"]
            continue
        printed = run(folder, line)
        if " import " in line:
            assert "serve it:  logitd serve checkpoints/mine" in printed
        if " --code " in line and "--run-code" not in line:
            assert re.search(r"verified: logits of .* largest difference \d\.\de-0[5-9]", printed)
        if " eval " in line:
            said = re.search(r"([\d.]+) nats per token", printed)
            assert said is not None, printed
            assert math.isclose(float(said[1]), loss, abs_tol=0.002)
    weights = {
        name: (folder / "checkpoints" / name / "model.safetensors").read_bytes()
        for name in ("mine", "mine-by-code", "mine-by-expression", "mine-by-flags")
    }
    assert len(set(weights.values())) == 1


@pytest.mark.slow
def test_serving_a_foreign_file_names_or_runs_the_import(desk: tuple[Path, float]) -> None:
    folder, _ = desk
    done = completed(["serve", "my_gpt.pt"], cwd=folder)
    assert done.returncode == 1
    name = f"{folder.name}-my_gpt"
    assert f"logitd import my_gpt.pt checkpoints/{name}\n" in done.stderr
    assert "logitd serve my_gpt.pt --import" in done.stderr
    refused = completed(["serve", "my_gpt.pt", "--import"], cwd=folder)
    assert refused.returncode == 1
    assert "vocabulary" in refused.stderr  # the folder has no text with a usual name
    run(
        folder,
        f"logitd import my_gpt.pt checkpoints/{name} --tokenizer characters:input.txt "
        "--code my_gpt.py:GPT",
    )
    with served(folder, "logitd serve my_gpt.pt --import") as client:  # it was imported already
        assert client.get("/info").json()["checkpoint"]["name"] == name
