"""Closed loop: which tokens, gaps and requests are counted."""

import asyncio
import itertools
from contextlib import closing
from typing import Any

import pytest

from benchmarks.closed_loop import (
    Completions,
    Load,
    Observed,
    Question,
    figures_of,
    model_of,
    prompts_of,
    tokens_after,
)
from benchmarks.raw_client import RawClient
from benchmarks.streams import Arrival, Failure, StreamFailed, StreamRecord, run_streams
from tests.service.client.scripted import SSE, reply, scripted

QUESTION = Question(prompt_tokens=8, tokens=4, shared=0.5, seconds=1.0, warm_up=0.0)


def stream(sent: float, *times: float) -> StreamRecord:
    return StreamRecord(sent, tuple(Arrival(at, 1) for at in times))


def test_observed_counts_the_measured_interval_alone() -> None:
    """In the interval from 10 to 20 s, a stream that began during the warm-up contributes tokens
    and gaps, but no first token."""
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


def test_good_requests_keep_both_limits() -> None:
    """A request is still good if one in a hundred of its gaps is too long."""
    steady = [11.0 + 0.1 * index for index in range(202)]
    one_long = [*steady, steady[-1] + 9.0]
    records = [
        stream(10.0, *steady),
        stream(10.0, *one_long),
        stream(9.9, *steady),  # too late
        stream(10.0, 11.0, 11.2),
        stream(10.0, 10.5),
    ]
    observed = Observed()
    observed.add(records, 9.0, 60.0)
    assert observed.good == 3


def test_prompts_share_only_the_given_prefix() -> None:
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
    """A server that adds a token before the prompt does not compute what was requested."""
    event = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 6}}
    with pytest.raises(StreamFailed, match="8 tokens"):
        tokens_after(event, 5, 8)


def streamed(*data: str) -> StreamRecord:
    """The record of a stream with these lines."""
    models = reply(200, {"data": [{"id": "a", "owned_by": "logitd"}]})
    events = "".join(f"{line}\n\n" for line in data).encode()
    with scripted(models, reply(200, events, SSE)) as server:

        async def run() -> list[StreamRecord]:
            dialect = Completions(await model_of(server.url))
            with closing(RawClient(server.url, dialect)) as ask:
                return await run_streams(ask, [[3, 4]], 2)

        (record,) = asyncio.run(run())
        return record


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
    record = streamed(data, "data: [DONE]")
    assert record.failure is not None
    assert record.failure.kind == kind
