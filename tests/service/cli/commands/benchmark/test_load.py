"""Load: every token of a real server is counted, failures are seen, and the figures are those of
the times at which tokens came."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from uvicorn.loops.auto import auto_loop_factory

from logitd.model.benchmark.workload import Workload
from logitd.service.cli.commands.benchmark.load import (
    Arrival,
    Ask,
    Failure,
    StreamRecord,
    asking,
    first_tokens_seconds,
    full_batch_rate,
    gaps,
    measure_server,
    run_streams,
)
from logitd.service.cli.commands.benchmark.raw_client import RawClient
from logitd.service.client import AsyncClient
from tests.model.factories import VOCAB_SIZE
from tests.service.client.scripted import events, scripted
from tests.service.serving import TEST_TIMEOUT, Serving, occupy, serving


@asynccontextmanager
async def usual(url: str) -> AsyncIterator[Ask]:
    async with httpx.AsyncClient(trust_env=False) as http:
        yield asking(AsyncClient(url, max_retries=0, timeout=TEST_TIMEOUT, http=http))


@asynccontextmanager
async def lean(url: str) -> AsyncIterator[Ask]:
    with closing(RawClient(url)) as ask:
        yield ask


Result = TypeVar("Result")
Asked = Callable[[str], AbstractAsyncContextManager[Ask]]
CLIENTS = pytest.mark.parametrize("client", [usual, lean])
"""Both count the same."""


def run_on_loop(work: Coroutine[Any, Any, Result]) -> Result:
    """On the event loop of `logitd bench`."""
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        return runner.run(work)


def streams(
    url: str, prompts: Sequence[Sequence[int]], tokens: int, client: Asked
) -> list[StreamRecord]:
    async def run() -> list[StreamRecord]:
        async with client(url) as ask:
            return await run_streams(ask, prompts, tokens)

    return run_on_loop(run())


def workload(**changed: Any) -> Workload:
    values: dict[str, Any] = {
        "batches": (1, 3),
        "prompt_tokens": 40,
        "tokens": 20,
        "rounds": 2,
        "vocab_size": VOCAB_SIZE,
        "prefill_chunk": 256,
    }
    return Workload(**(values | changed))


def measure(url: str, asked: Workload, client: Asked) -> Any:
    async def run() -> Any:
        async with client(url) as ask:
            return await measure_server(ask, asked)

    return run_on_loop(run())


# Against a real server


@CLIENTS
def test_every_token_comes_even_past_an_end_of_text(speller: Serving, client: Asked) -> None:
    """This model writes its end of text every 34 tokens or so."""
    before = speller.sample("logitd_generation_tokens_total")
    records = streams(speller.url, [[97], [98], [99]], 100, client)
    assert [record.failure for record in records] == [None] * 3
    assert [sum(arrival.tokens for arrival in record.arrivals) for record in records] == [100] * 3
    speller.wait_idle()
    assert speller.sample("logitd_generation_tokens_total") - before == 300
    for record in records:
        moments = [record.sent, *(arrival.at for arrival in record.arrivals)]
        assert moments == sorted(moments)


@CLIENTS
def test_a_prompt_that_was_there_before_is_computed_again(server: Serving, client: Asked) -> None:
    cached = server.sample("logitd_prompt_tokens_cached_total")
    prompt = list(range(64))
    streams(server.url, [prompt], 2, client)
    streams(server.url, [prompt, prompt], 2, client)
    server.wait_idle()
    assert server.sample("logitd_prompt_tokens_cached_total") == cached


@CLIENTS
def test_a_workload_is_run_whole(server: Serving, client: Asked) -> None:
    before = server.finished("length")
    asked = workload()
    figures = measure(server.url, asked, client)
    assert not figures.failed
    server.wait_idle()
    # A warm-up; prefills of 1 and 3, batches of 1 and 3, two rounds of each.
    assert server.finished("length") - before == 1 + 2 * (1 + 3) + 2 * (1 + 3)
    assert [one.prompts for one in figures.prefill] == [1, 3]
    assert all(one.tokens_per_second > 0 for one in figures.prefill)
    assert [(one.batch, one.streams) for one in figures.decode] == [(1, 2), (3, 6)]
    for one in figures.decode:
        assert one.tokens_per_second is None or one.tokens_per_second > 0
        assert one.tokens_per_chunk >= 1
        assert one.first_token.p50 <= one.first_token.p99
        assert one.gap.p50 <= one.gap.p99
        assert one.client_cpu > 0


# Failures


@CLIENTS
def test_a_full_queue_is_a_failure_of_the_stream_that_met_it(
    spelling_path: Path, client: Asked
) -> None:
    full = {"slots": 1, "max_queue": 0, "slow_reader_timeout": TEST_TIMEOUT}
    with serving(spelling_path, **full) as running, ExitStack() as stack:
        occupy(running, stack)
        records = streams(running.url, [[97], [98]], 5, client)
        assert [record.arrivals for record in records] == [(), ()]
        for record in records:
            assert record.failure is not None
            assert record.failure.kind == "QueueFullError"
            assert "the queue holds 0" in record.failure.message
        figures = measure(running.url, workload(batches=(2,), rounds=1), client)
    assert figures.failed
    (decode,) = figures.decode
    assert [failure.kind for failure in decode.failures] == ["QueueFullError"] * 2
    assert (decode.streams, decode.tokens_per_second, decode.first_token) == (2, None, None)
    assert (decode.gap, decode.tokens_per_chunk) == (None, None)
    assert figures.prefill[0].tokens_per_second is None


@CLIENTS
def test_some_may_fail_and_the_others_count(server: Serving, client: Asked) -> None:
    """The second prompt is outside of the vocabulary."""
    good, bad = streams(server.url, [[1], [9999]], 5, client)
    assert good.failure is None
    assert sum(arrival.tokens for arrival in good.arrivals) == 5
    assert bad.failure is not None
    assert bad.failure.kind == "BadRequestError"


def chunk(token_ids: list[int], **members: Any) -> dict[str, Any]:
    checkpoint = {"name": "x", "step": 1, "val_loss": None, "weights_sha256": "0"}
    choice = {"index": 0, "prompt_index": 0, "text": "x", "token_ids": token_ids,
              "finish_reason": None, "stop_reason": None}  # fmt: skip
    return {"id": "x", "created": 1, "model": "x", "checkpoint": checkpoint,
            "choices": [choice]} | members  # fmt: skip


TAIL = {
    "usage": {"prompt_tokens": 1, "completion_tokens": 4, "total_tokens": 5, "cached_tokens": 0},
    "seed": 0,
    "timings": {"queue_ms": 0.0, "prefill_ms": 0.0, "decode_ms": 0.0, "ttft_ms": 0.0,
                "tokens_per_second": 1.0},
}  # fmt: skip


@CLIENTS
def test_tokens_are_counted_by_ids_and_chunks_without_any_are_none(client: Asked) -> None:
    stream = events(chunk([1]), chunk([]), chunk([2, 3, 4]), chunk([], **TAIL))
    with scripted(stream) as server:
        (record,) = streams(server.url, [[1]], 4, client)
        sent = server.body()
    assert record.failure is None
    assert [arrival.tokens for arrival in record.arrivals] == [1, 3]
    assert sent == {
        "prompt": [1], "max_tokens": 4, "ignore_eos": True, "temperature": 1.0, "seed": 0,
        "prefix_reuse": False, "stream": True,
    }  # fmt: skip


@CLIENTS
def test_fewer_tokens_than_asked_for_are_a_failure(client: Asked) -> None:
    with scripted(events(chunk([1, 2]), chunk([], **TAIL))) as server:
        (record,) = streams(server.url, [[1]], 4, client)
    assert record.failure == Failure("TokensMissing", "2 of 4 tokens came")


@CLIENTS
def test_a_stream_that_breaks_off_is_a_failure(client: Asked) -> None:
    with scripted(events(chunk([1, 2]), end=False)) as server:
        (record,) = streams(server.url, [[1]], 4, client)
    assert record.failure is not None
    assert record.failure.kind == "StreamError"
    assert [arrival.tokens for arrival in record.arrivals] == [2]


# Figures of known times


def record(*arrivals: tuple[float, int], sent: float = 0.0) -> StreamRecord:
    return StreamRecord(sent, tuple(Arrival(at, tokens) for at, tokens in arrivals))


FAILED = StreamRecord(0.0, (Arrival(1.0, 1),), Failure("X", "y"))


def test_the_rate_is_that_of_the_whole_batch() -> None:
    """The last begins at 3, the first ends at 7: in between come 2 + 4 and 1 + 1 tokens."""
    early = record((1, 1), (2, 1), (3, 5), (5, 2), (7, 4))
    late = record((3, 1), (4, 1), (6, 1), (8, 9))
    assert full_batch_rate([early, late]) == (2 + 4 + 1 + 1) / (7 - 3)


def test_the_rate_of_one_leaves_its_first_tokens_out() -> None:
    assert full_batch_rate([record((1, 1), (2, 1), (5, 3))]) == 4 / 4


@pytest.mark.parametrize(
    "records",
    [[record((1, 1), (2, 1)), record((3, 1), (4, 1))], [record((1, 1))],
     [record((1, 1), (9, 1)), FAILED]],
)  # fmt: skip
def test_without_a_whole_batch_there_is_no_rate(records: list[StreamRecord]) -> None:
    assert full_batch_rate(records) is None


def test_prefill_ends_with_the_last_of_the_first_tokens() -> None:
    records = [record((3, 1), sent=1.0), record((5, 1), (9, 1), sent=1.5)]
    assert first_tokens_seconds(records) == 4.0
    assert first_tokens_seconds([*records, FAILED]) is None


def test_gaps_are_between_chunks_whatever_they_carry() -> None:
    assert gaps(record((1, 1), (2, 4), (5, 1))) == [1, 3]
    assert gaps(record((1, 1))) == []
