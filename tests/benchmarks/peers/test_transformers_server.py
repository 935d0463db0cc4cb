"""`transformers serve`: it is given the same model, and every token that it sends is counted."""

import asyncio
import importlib.util
import json
import sys
from pathlib import Path

import httpx
import pytest
import torch
import transformers

from benchmarks.peers.contract import disagreement
from benchmarks.peers.foreign_server import ServerMissing
from benchmarks.peers.transformers_generate import logprobs
from benchmarks.peers.transformers_server import (
    asking_transformers,
    check_usage,
    save_for_transformers,
    text_of,
    tokens_in,
    transformers_server,
)
from logitd.service.cli.commands.benchmark.load import StreamFailed, StreamRecord, run_streams
from tests.benchmarks.peers.conftest import Saved


@pytest.fixture(scope="module")
def folder(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("theirs")
    save_for_transformers(saved.folder, path, "float32")
    return path


def test_the_folder_is_the_same_model(folder: Path, saved: Saved) -> None:
    gpt2 = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert disagreement(logprobs(gpt2, saved.ids), saved.expected) < 1e-4
    config = gpt2.generation_config
    assert (config.do_sample, config.temperature, config.top_k, config.top_p) == (True, 1, 0, 1)
    assert config.eos_token_id is None, "nothing ends a text early"


def test_a_text_has_the_ids_that_it_was_made_of(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = torch.randint(300, (50,)).tolist()
    assert tokenizer(text_of(ids))["input_ids"] == ids
    assert str(tokenizer.decode(ids)).split() == text_of(ids).split()


def test_tokens_of_a_line() -> None:
    piece = 'data: {"choices": [{"text": " t5"}]}'
    end = 'data: {"choices": [{"text": ""}], "usage": {"prompt_tokens": 2, "completion_tokens": 1}}'
    assert tokens_in(piece, None) == (1, None)
    assert tokens_in("", None) == (0, None)
    assert tokens_in("data: [DONE]", None) == (0, None)
    assert tokens_in(end, None) == (0, {"prompt_tokens": 2, "completion_tokens": 1})
    with pytest.raises(StreamFailed, match="out of pages"):
        tokens_in('data: {"error": "out of pages"}', None)


def test_counts_have_to_be_the_same() -> None:
    usage = {"prompt_tokens": 2, "completion_tokens": 3}
    check_usage(usage, prompt=2, came=3)
    with pytest.raises(StreamFailed, match="the server counts 2 and 3 tokens"):
        check_usage(usage, prompt=2, came=4)
    with pytest.raises(StreamFailed, match="the server counts 2 and 3 tokens"):
        check_usage(usage, prompt=1, came=3)
    with pytest.raises(StreamFailed, match="without its counts, after 3 tokens"):
        check_usage(None, prompt=2, came=3)


def streams(transport: httpx.AsyncBaseTransport | None, url: str) -> list[StreamRecord]:
    async def run() -> list[StreamRecord]:
        async with httpx.AsyncClient(transport=transport, trust_env=False, timeout=60) as http:
            return await run_streams(asking_transformers(http, url), [[1, 2, 3], [7, 8, 9]], 5)

    return asyncio.run(run())


def answering(status: int, *pieces: str, completion: int) -> httpx.MockTransport:
    """A server whose every stream is the same."""
    chunks = [{"choices": [{"text": piece}]} for piece in pieces]
    usage = {"prompt_tokens": 3, "completion_tokens": completion}
    lines = [json.dumps(chunk) for chunk in (*chunks, {"choices": [], "usage": usage})]
    body = "".join(f"data: {line}\n\n" for line in lines)
    return httpx.MockTransport(lambda request: httpx.Response(status, text=body))


@pytest.mark.parametrize(
    ("status", "pieces", "completion", "kind"),
    [
        (200, ("t1", " t2", " t3 t4", " t5"), 5, None),
        (200, ("t1", " t2"), 2, "TokensMissing"),
        (200, ("t1", " t2"), 5, "Miscounted"),
        (503, (), 0, "HTTP 503"),
    ],
)
def test_a_stream_that_is_not_whole_fails(
    status: int, pieces: tuple[str, ...], completion: int, kind: str | None
) -> None:
    for record in streams(answering(status, *pieces, completion=completion), "http://it"):
        assert (record.failure and record.failure.kind) == kind
        if kind is None:
            assert [arrival.tokens for arrival in record.arrivals] == [1, 1, 2, 1]


def test_a_server_that_is_not_there_fails() -> None:
    for record in streams(None, "http://127.0.0.1:1"):
        assert record.failure is not None
        assert record.failure.kind == "ConnectError"


def test_one_that_does_not_start_is_missing(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho no such package\nexit 3\n")
    program.chmod(0o755)
    with (
        pytest.raises(ServerMissing, match=r"it ended with 3:\nno such package"),
        transformers_server(
            tmp_path,
            python=str(program),
            dtype="float32",
            threads=1,
            continuous=False,
            largest=1,
            positions=8,
        ),
    ):
        raise AssertionError("the block is not entered")  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="`transformers serve` needs accelerate"
)
@pytest.mark.parametrize("continuous", [True, False])
def test_a_real_one_is_asked(folder: Path, continuous: bool) -> None:
    with transformers_server(
        folder, python=sys.executable, dtype="float32", threads=1, continuous=continuous,
        largest=2, positions=8,
    ) as url:  # fmt: skip
        records = streams(None, url)
    assert [record.failure for record in records] == [None, None]
    assert [sum(arrival.tokens for arrival in record.arrivals) for record in records] == [5, 5]
