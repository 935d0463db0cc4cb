"""Tokens of a request that arrive together are sent in one write, in every format. The reply is the
same with and without the server extension for direct writes.
"""

import asyncio
from typing import Any, cast

import pytest

from logitd.model.inference.engine.events import TokenEvent
from logitd.service.engine.driver import EngineDriver
from logitd.service.engine.submission import Submission
from logitd.service.engine.usage import Usage
from logitd.service.http import completions
from tests.service.engine.harness import generation, rest, running, tiny, token_ids
from tests.service.serving import Serving, dechunked, events, read_all, request_bytes

TOKENS = 60
FIELDS: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "seed": 5, "n": 2}
BODIES: dict[str, Any] = {
    "/generate": {"prompt": ["one", "two"], **FIELDS},
    "/v1/completions": {"prompt": ["one", "two"], **FIELDS},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "one"}], **FIELDS},
}


def texts(choices: list[Any]) -> dict[int, str]:
    """The text of each choice, put together from its deltas if it was streamed."""
    whole: dict[int, str] = {}
    for choice in choices:
        message = choice.get("message", choice.get("delta", {"content": choice.get("text")}))
        whole[choice["index"]] = whole.get(choice["index"], "") + (message.get("content") or "")
    return whole


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("direct", [True, False])
def test_tokens_that_arrive_together_are_written_together(
    chatter: Serving, monkeypatch: pytest.MonkeyPatch, path: str, direct: bool
) -> None:
    expected = texts(chatter.json(path, BODIES[path])["choices"])
    monkeypatch.setattr("logitd.service.engine.wakeup.PAUSE_FACTOR", 1e9)
    monkeypatch.setattr("logitd.service.engine.wakeup.MAX_PAUSE", 0.1)
    if not direct:
        monkeypatch.setattr(completions, "body_writer", lambda scope: None)
    with chatter.connect() as raw:
        body = {**BODIES[path], "stream": True}
        raw.sendall(request_bytes(path, body, "Connection: close"))
        writes = list(dechunked(read_all(raw)))
    streamed = [choice for chunk in events(b"".join(writes)) for choice in chunk["choices"]]
    assert texts(streamed) == expected
    assert len(writes) < TOKENS / 2, "of several choices with TOKENS each"


@pytest.mark.parametrize("path", BODIES)
def test_http_1_0_client_gets_no_chunks(chatter: Serving, path: str) -> None:
    """The sizes of the chunks were in the body."""
    expected = texts(chatter.json(path, BODIES[path])["choices"])
    request = request_bytes(path, {**BODIES[path], "stream": True})
    with chatter.connect() as raw:
        raw.sendall(request.replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        head, _, body = read_all(raw).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert texts([choice for chunk in events(body) for choice in chunk["choices"]]) == expected


async def test_reader_takes_events_without_waking_the_task() -> None:
    async with running(tiny()) as (owner, _):
        submission = owner.submit([generation("a", 20)])
        taken: list[Any] = []

        def read() -> bool:
            taken.extend(submission.take_now())
            return not submission.finished

        submission.reader = read
        assert await submission.take() == [], "woken only at the end"
        assert len(token_ids(taken, "a")) == 20


async def test_first_token_of_each_sequence_is_urgent() -> None:
    """Later tokens wait until the pause between two deliveries ends."""
    driver = cast(EngineDriver, None)  # for aborts only
    submission = Submission(driver, ["a", "b"], 3, Usage())
    urgent = []
    for name, index in [("a", 0), ("a", 0), ("b", 0), ("a", 0), ("b", 1), ("b", 0), ("b", 1)]:
        submission.deliver(TokenEvent(name, index, 7))
        urgent.append(submission.urgent)
        submission.wake()
    assert urgent == [True, False, True, False, True, False, False]
    assert len(submission.take_now()) == 7


async def test_error_of_a_reader_is_raised_after_the_last_sequence_has_ended() -> None:
    """Guards against a reply without a choice: the last event of another sequence hid the error."""
    async with running(tiny()) as (owner, _):
        bad, good = owner.submit([generation("a", 2)]), owner.submit([generation("b", 20)])

        def fail() -> bool:
            raise ZeroDivisionError

        bad.reader = fail
        await rest(good)
        assert await bad.take()
        assert not bad.finished
        with pytest.raises(ZeroDivisionError):
            await bad.take()


async def test_failing_reader_ends_only_its_own_submission() -> None:
    """The failing reader is called while events are delivered to all submissions."""
    async with running(tiny()) as (owner, _):
        bad, good = owner.submit([generation("a", 20)]), owner.submit([generation("b", 20)])

        def fail() -> bool:
            bad.take_now()
            raise ZeroDivisionError

        bad.reader = fail
        with pytest.raises(ZeroDivisionError):
            await asyncio.gather(bad.take())
        assert len(token_ids(await rest(good), "b")) == 20
