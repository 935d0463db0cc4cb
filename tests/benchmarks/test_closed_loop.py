"""Closed loop: which tokens, gaps and requests count, by hand; and a small run of real servers."""

import asyncio
import itertools
import json
from contextlib import closing
from typing import Any

import pytest

from benchmarks.closed_loop import (
    Completions,
    Load,
    Observed,
    Question,
    figures_of,
    main,
    model_of,
    prompts_of,
    tokens_after,
)
from logitd.service.cli.commands.benchmark.load import (
    Arrival,
    Failure,
    StreamFailed,
    StreamRecord,
    run_streams,
)
from logitd.service.cli.commands.benchmark.raw_client import RawClient
from tests.service.client.scripted import SSE, reply, scripted

QUESTION = Question(prompt_tokens=8, tokens=4, shared=0.5, seconds=1.0, warm_up=0.0)


def stream(sent: float, *times: float) -> StreamRecord:
    return StreamRecord(sent, tuple(Arrival(at, 1) for at in times))


def test_observed_counts_the_measured_interval_alone() -> None:
    """From 10 to 20: a stream of the warm-up has tokens and gaps there, and no first token."""
    observed = Observed()
    records = [
        stream(8.0, 9.0, 10.5, 11.0),
        stream(12.0, 13.0, 14.0, 19.0),
        stream(19.5, 21.0, 22.0),  # its request was sent in time, its tokens came too late
        StreamRecord(12.0, (), Failure("HTTP 429", "the queue is full")),
    ]
    observed.add(records, 10.0, 20.0)
    assert (observed.seconds, observed.tokens) == (10.0, 5)
    assert observed.first_tokens == [1.0, 1.5]
    assert observed.gaps == [1.5, 0.5, 1.0, 5.0]
    assert observed.failures == ["HTTP 429: the queue is full"]
    observed.add([stream(30.0, 31.0)], 30.0, 40.0)
    figures = figures_of("a", Load(clients=3), observed)
    assert (figures.requests, figures.failed, figures.tokens_per_second) == (3, 1, 0.3)
    assert figures.gap is not None
    assert figures.gap.p50 == 1.25


def test_prompts_share_the_asked_prefix_alone() -> None:
    first, second = itertools.islice(prompts_of(QUESTION, 250, "a"), 2)
    other = next(prompts_of(QUESTION, 250, "b"))
    assert first[:4] == second[:4] == other[:4]
    assert len({tuple(prompt[4:]) for prompt in (first, second, other)}) == 3
    assert {len(first), len(second), len(other)} == {8}


@pytest.mark.parametrize(
    ("event", "after"),
    [
        ({"choices": [{"text": "a"}], "usage": {"completion_tokens": 9}}, 9),
        ({"choices": [], "usage": {"completion_tokens": 7}}, 7),
        ({"choices": [{"text": "a"}]}, 6),
        ({"choices": [{"text": "", "finish_reason": "length"}], "usage": None}, 5),
        ({"choices": [{"text": "ab"}], "timings": {"predicted_n": 8}}, 8),
        ({"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": 6}}, 6),
    ],
)
def test_tokens_of_an_event(event: dict[str, Any], after: int) -> None:
    assert tokens_after(event, 5, 8) == after


def test_tokens_after_refuses_another_prompt_length() -> None:
    """A server that adds a token of its own before the prompt computes something else."""
    event = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 6}}
    with pytest.raises(StreamFailed, match="8 tokens"):
        tokens_after(event, 5, 8)


def streamed(*data: str, owner: str = "logitd") -> tuple[StreamRecord, dict[str, Any], str | None]:
    """What a client sees of a server that has this owner and streams these events: the record of
    the stream, the body that was sent, and the header `Connection`."""
    models = reply(200, {"data": [{"id": "a", "owned_by": owner}]})
    events = "".join(f"{line}\n\n" for line in data).encode()
    with scripted(models, reply(200, events, SSE)) as server:

        async def run() -> list[StreamRecord]:
            dialect = Completions(await model_of(server.url))
            with closing(RawClient(server.url, dialect)) as ask:
                return await run_streams(ask, [[3, 4]], 2)

        (record,) = asyncio.run(run())
        return record, server.body(1), server.header("Connection", 1)


def test_every_server_gets_the_same_request() -> None:
    """Ids as they are, at temperature 1, to the length. llama-server alone is asked to count as it
    goes: others refuse fields that they do not know. And it closes connections that it keeps, so
    each request has one of its own: of streams that came right after another, one in ten had
    failed."""
    piece = 'data: {"choices": [{"text": "a"}]}'
    data = (": keep-alive", piece, piece, "data: [DONE]")
    record, body, connection = streamed(*data)
    assert record.failure is None
    assert [arrival.tokens for arrival in record.arrivals] == [1, 1]
    assert (body["prompt"], body["temperature"], body["ignore_eos"]) == ([3, 4], 1.0, True)
    assert connection != "close"
    record, theirs, connection = streamed(*data, owner="llamacpp")
    assert record.failure is None
    assert theirs == {**body, "timings_per_token": True}
    assert connection == "close"


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ('data: {"error": "no"}', "error"),
        ("data: {", "MalformedReplyError"),
        ("data: 3", "MalformedReplyError"),
        ('data: {"a": 1}', "MalformedReplyError"),
        ('data: {"choices": [3]}', "MalformedReplyError"),
        ('data: {"choices": [{"text": "a"}]}', "TokensMissing"),
    ],
)
def test_incomplete_stream_has_failed(data: str, kind: str) -> None:
    record, _, _ = streamed(data, "data: [DONE]")
    assert record.failure is not None
    assert record.failure.kind == kind


@pytest.mark.slow
def test_closed_loop_runs_with_clients_and_at_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    """The bundled checkpoint, by two servers, with clients and at a rate."""
    flags = [
        "--threads", "1", "--serve=--slots 2", "--serve=--slots 2 --target-gap none",
        "--clients", "3", "--rate", "20", "--prompt-tokens", "70", "--tokens", "5",
        "--shared", "0.5", "--seconds", "0.5", "--warm-up", "0.3", "--rounds", "1",
    ]  # fmt: skip
    assert main(flags) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [(result["target"], result["load"]) for result in results] == [
        ("logitd serve --slots 2", "3"),
        ("logitd serve --slots 2 --target-gap none", "3"),
        ("logitd serve --slots 2", "20/s"),
        ("logitd serve --slots 2 --target-gap none", "20/s"),
    ]
    assert all(result["failed"] == 0 for result in results)
    assert all(result["tokens_per_second"] > 0 for result in results)
