"""Footprint of a server: time until it is ready, and memory."""

import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from benchmarks.footprint import besides, peak, resident
from benchmarks.synthetic import save_synthetic
from logitd.model.inference.kernels.cpu.library import KernelsUnavailable, load_library
from logitd.model.transformer.shapes import gpt2_shape
from tests.e2e.server import ServedProcess

READY_SECONDS = 10
"""Time limit, in seconds, for a server to become ready. On an idle machine it takes a few
seconds."""

BESIDES = 500 * 10**6
"""Maximum number of resident bytes that are neither weights nor KV cache: Python, torch, the
vocabulary, the code."""


@pytest.fixture(autouse=True)
def built() -> None:
    """Build the kernels before anything is measured."""
    with suppress(KernelsUnavailable):
        load_library()


@pytest.fixture(scope="module")
def gpt2_124m(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2 124M with random weights, large enough to notice a second copy."""
    config = gpt2_shape(vocab_size=50_257, context_length=1024, n_layer=12, n_head=12, d_model=768)
    return save_synthetic(tmp_path_factory.mktemp("gpt2") / "124m", config).path


@pytest.mark.slow
def test_server_is_ready_soon() -> None:
    began = time.monotonic()
    with ServedProcess(cold=True):
        took = time.monotonic() - began
    assert took < READY_SECONDS


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("model", ["bundled", "124m"])
def test_server_takes_little_more_than_weights_and_cache(
    request: pytest.FixtureRequest, model: str, dtype: str
) -> None:
    flags = ["--dtype", dtype, "--slots", "4"]
    if model == "124m":
        flags += ["--checkpoint", str(request.getfixturevalue("gpt2_124m"))]
    with ServedProcess(*flags, cold=True) as process:
        with httpx.Client(base_url=process.url, trust_env=False, timeout=60) as http:
            info = http.get("/info").json()
            for seed in range(4):
                body = {"prompt": "import os", "max_tokens": 20, "seed": seed, "n": 4}
                assert http.post("/generate", json=body).status_code == 200
                body = {"prompt": "def main():", "positions": "all"}
                assert http.post("/logits", json=body).status_code == 200
        held, most = resident(process.process.pid), peak(process.process.pid)
    assert besides(held, info) < BESIDES
    assert besides(most, info) < BESIDES, "a second copy was never in memory"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantizing_takes_no_second_copy(gpt2_124m: Path, kind: str) -> None:
    """Rounding the whole head in one operation once took 0.9 GB of additional memory at startup."""
    flags = ["--dtype", "bfloat16", "--slots", "4", "--checkpoint", str(gpt2_124m)]
    with ServedProcess(*flags, "--quantize", kind, cold=True) as process:
        with httpx.Client(base_url=process.url, trust_env=False, timeout=60) as http:
            info = http.get("/info").json()
        most = peak(process.process.pid)
    assert besides(most, info) + info["kv_cache_bytes"] < BESIDES + info["parameters"]
