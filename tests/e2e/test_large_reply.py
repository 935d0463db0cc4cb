"""A reply of 206 MB, and other requests with a long prompt, take bounded memory and do not delay
other clients."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.large_reply import (
    CONTEXT,
    PROMPT,
    REPLY_BYTES,
    VOCABULARY,
    MemoryWatch,
    TokenWatch,
    ask,
    served,
)
from benchmarks.streams import gaps_between
from benchmarks.synthetic import save_synthetic
from logitd.model.transformer.shapes import gpt2_shape

LIMIT = 64 * 10**6


@pytest.mark.slow
@pytest.mark.parametrize("accept", ["application/x-npy", "application/vnd.safetensors"])
def test_large_reply_is_never_held_whole(tmp_path: Path, accept: str) -> None:
    """A reply of 206 MB takes 3 to 10 MB of memory, in addition to the 40 to 75 MB that the first
    long prompt takes permanently."""
    assert REPLY_BYTES > 3 * LIMIT
    config = gpt2_shape(
        vocab_size=VOCABULARY, context_length=CONTEXT, n_layer=2, n_head=2, d_model=64
    )
    checkpoint = save_synthetic(tmp_path / "wide", config)
    with served(checkpoint.path, threads=1) as server:
        tokens = TokenWatch(server.url)
        while len(tokens.times) < 50:  # the stream has begun
            pass
        # One-time allocations do not belong to the reply.
        httpx.post(f"{server.url}/score", json={"prompt": PROMPT}, timeout=600)
        memory = MemoryWatch(server.pid)
        began, ended = ask(server.url, accept)
        rose = memory.stop()
        tokens.stop()
    assert rose < LIMIT // 2
    assert len(gaps_between(tokens.times, began, ended)) > 20, "the stream continued"


@pytest.mark.slow
def test_requests_for_a_long_prompt_take_bounded_memory(tmp_path: Path) -> None:
    """The prompt has 1,024 tokens, the vocabulary 50,257. A lens of 7 layers would be 360 million
    logits (1.4 GB). A reply of stages is sent if it fits the budget, and refused otherwise."""
    config = gpt2_shape(
        vocab_size=VOCABULARY, context_length=CONTEXT, n_layer=6, n_head=2, d_model=64
    )
    checkpoint = save_synthetic(tmp_path / "deep", config)
    within = ["embedding", "blocks.*.mlp.*", "blocks.*.attention.q", "blocks.*.output"]
    asked: list[tuple[str, dict[str, Any], str | None]] = [
        ("/lens", {"positions": "all", "top_k": 5}, None),
        ("/lens", {"positions": "all", "top_k": 40}, "286720 logprobs, but the limit is 262144"),
        ("/activations", {"positions": "all", "stages": within}, None),
        ("/activations", {"positions": "all", "stages": ["*"]},
         " elements, but the limit is 16777216"),
        ("/attributions", {"methods": ["integrated_gradients", "direct"], "steps": 2}, None),
        ("/sweep", {"vary": {"stage": "blocks.*.mlp.out", "operation": "zero"},
                    "over": ["layers"]}, None),
    ]  # fmt: skip
    with (
        served(checkpoint.path, threads=1) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        client.post("/score", json={"prompt": PROMPT}, timeout=600)  # the server is warm
        for path, fields, refusal in asked:
            memory = MemoryWatch(server.pid)
            reply = client.post(path, json={"prompt": PROMPT, **fields}, timeout=600)
            rose = memory.stop()
            assert reply.status_code == (200 if refusal is None else 400), reply.text[:500]
            assert refusal is None or refusal in reply.json()["error"]["message"]
            assert rose < 2 * LIMIT, f"{path} {fields}: {rose:,} bytes"
