"""A reply of 206 MB takes a bounded part of the server's memory, and nobody else's tokens."""

from pathlib import Path

import pytest

from benchmarks.large_reply import (
    CONTEXT,
    REPLY_BYTES,
    VOCABULARY,
    MemoryWatch,
    TokenWatch,
    ask,
    served,
)
from benchmarks.synthetic import save_synthetic
from model.transformer.config import gpt2_shape

LIMIT = 64 * 10**6


@pytest.mark.slow
@pytest.mark.parametrize("accept", ["application/x-npy", "application/vnd.safetensors"])
def test_a_large_reply_is_never_held_whole(tmp_path: Path, accept: str) -> None:
    assert REPLY_BYTES > 3 * LIMIT
    config = gpt2_shape(
        vocab_size=VOCABULARY, context_length=CONTEXT, n_layer=2, n_head=2, d_model=64
    )
    checkpoint = save_synthetic(tmp_path / "wide", config)
    with served(checkpoint.path, threads=1) as (url, pid):
        tokens = TokenWatch(url)
        while len(tokens.times) < 50:  # the stream has begun, and the server is warm
            pass
        memory = MemoryWatch(pid)
        began, ended = ask(url, accept)
        rose = memory.stop()
        tokens.stop()
    assert rose < LIMIT
    assert len(tokens.between(began, ended)) > 20, "the stream went on"
