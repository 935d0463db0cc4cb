"""Limits of API keys: usage is counted for each key, reported with the key's limits, and
released.
"""

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from logitd.service.access.auth import ApiKeyError, read_api_keys
from logitd.service.access.key_limits import KeyLimit, KeyLimits
from logitd.service.engine.admission import Limit
from logitd.service.errors import ApiError
from logitd.service.http.schemas import ErrorReply
from tests.model.factories import save_tiny_checkpoint
from tests.service.serving import Serving, eventually, request_bytes, serving, statuses_in_a_row
from tests.service.spelling import CONTEXT_LENGTH, spelling_gpt

ANN, BEN = "the-key-of-ann", "the-key-of-ben"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def guarded(checkpoint_path: Path) -> Iterator[Serving]:
    with serving(checkpoint_path, api_keys=f"ann={ANN}", key_at_once=1) as server:
        yield server


def rejected(limits: KeyLimits, name: str) -> ApiError:
    with pytest.raises(ApiError) as caught, limits.request(name):
        pass
    return caught.value


def test_requests_of_a_minute_return_evenly(clock: Clock) -> None:
    limits = KeyLimits(KeyLimit(per_minute=6), {}, clock)
    for _ in range(6):
        with limits.request("ann"):
            pass
    error = rejected(limits, "ann")
    assert (error.status, error.retry_after, error.limit) == (429, 10, Limit.KEY_PER_MINUTE)
    assert "'ann' may send 6 requests per minute" in error.message
    clock.now += 9.9
    assert rejected(limits, "ann").retry_after == 1
    clock.now += 0.2
    with limits.request("ann"):
        pass
    rejected(limits, "ann")
    clock.now += 3600
    for _ in range(6):
        with limits.request("ann"):
            pass
    rejected(limits, "ann")


def test_concurrent_requests_count_until_they_end() -> None:
    limits = KeyLimits(KeyLimit(at_once=2), {})
    with ExitStack() as stack:
        stack.enter_context(limits.request("ann"))
        with ExitStack() as other:
            other.enter_context(limits.request("ann"))
            error = rejected(limits, "ann")
        with pytest.raises(ZeroDivisionError), limits.request("ann"):
            raise ZeroDivisionError
        assert (error.status, error.limit) == (429, Limit.KEY_AT_ONCE)
        assert "'ann' may have 2 concurrent requests and has 2" in error.message
        with limits.request("ann"):
            rejected(limits, "ann")
    with limits.request("ann"), limits.request("ann"):
        rejected(limits, "ann")


def test_rejected_request_does_not_count(clock: Clock) -> None:
    limits = KeyLimits(KeyLimit(per_minute=2, at_once=1), {}, clock)
    with limits.request("ann"):
        for _ in range(5):
            assert rejected(limits, "ann").limit is Limit.KEY_AT_ONCE
    with limits.request("ann"):
        pass
    assert rejected(limits, "ann").limit is Limit.KEY_PER_MINUTE


def test_each_key_has_its_own_limits(clock: Clock) -> None:
    own = {"ben": KeyLimit(per_minute=2), "cat": KeyLimit(0, 0)}
    limits = KeyLimits(KeyLimit(per_minute=1, at_once=3), own, clock)
    assert [limits.of(name) for name in ("ann", "ben", "cat")] == [(1, 3), (2, 3), (0, 0)]
    for name, count in (("ann", 1), ("ben", 2)):
        for _ in range(count):
            with limits.request(name):
                pass
        rejected(limits, name)
    with ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(limits.request("cat"))


def test_replaced_limits_keep_spent_tokens(clock: Clock) -> None:
    limits = KeyLimits(KeyLimit(), {"ann": KeyLimit(per_minute=10)}, clock)
    for _ in range(10):
        with limits.request("ann"):
            pass
    rejected(limits, "ann")
    limits.replace({"ann": KeyLimit(per_minute=12)})
    for _ in range(2):
        with limits.request("ann"):
            pass
    assert rejected(limits, "ann").retry_after == 5
    limits.replace({"ann": KeyLimit(per_minute=2)})
    assert rejected(limits, "ann").retry_after == 30, "no longer than the wait for one request"
    limits.replace({})
    for _ in range(100):
        with limits.request("ann"):
            pass
    limits.replace({"ann": KeyLimit(per_minute=1)})
    with limits.request("ann"):
        pass


@given(st.integers(1, 100), st.lists(st.floats(0, 30), max_size=80))
def test_minute_has_at_most_twice_its_number(per_minute: int, pauses: list[float]) -> None:
    """A client can empty a full bucket, and the bucket is refilled within a minute."""
    clock = Clock()
    limits = KeyLimits(KeyLimit(per_minute=per_minute), {}, clock)
    taken: list[float] = []
    for pause in pauses:
        clock.now += pause
        for _ in range(10):
            with suppress(ApiError), limits.request("ann"):
                taken.append(clock.now)
    for start in taken:
        within = [moment for moment in taken if start <= moment < start + 60]
        assert len(within) <= 2 * per_minute


# Syntax


@pytest.mark.parametrize(
    ("line", "limit"),
    [
        (f"ann={ANN}", None),
        (f"ann={ANN} per-minute=60", KeyLimit(60, None)),
        (f"ann = {ANN}  at-once=4   per-minute=60", KeyLimit(60, 4)),
        (f"ann={ANN} at-once=0", KeyLimit(None, 0)),
    ],
)
def test_limits_follow_a_key(line: str, limit: KeyLimit | None, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{line}\nben={BEN}\n")
    expected = {} if limit is None else {"ann": limit}
    for keys in (read_api_keys(None, file), read_api_keys(SecretStr(f"{line},ben={BEN}"), None)):
        assert keys.names == ("ann", "ben")
        assert keys.limits == MappingProxyType(expected)
        assert keys.name_of(ANN.encode()) == "ann"


@pytest.mark.parametrize(
    "words",
    ["per-minute=", "per-minute=x", "per-minute=-1", "at-once=1.5", "at-once=2 at-once=2",
     "per-minute=1000001", "at-once=٣", "per-minut=3"],
)  # fmt: skip
def test_invalid_limit_is_refused_without_the_key(words: str) -> None:
    with pytest.raises(ApiKeyError, match="entry 1 of the API keys has ") as caught:
        read_api_keys(SecretStr(f"ann={ANN} {words}"), None)
    assert ANN not in str(caught.value)
    assert "per-minute=N and at-once=N" in str(caught.value)


# Over HTTP


def test_key_above_its_limit_gets_429_with_its_numbers(tmp_path: Path) -> None:
    checkpoint = save_tiny_checkpoint(tmp_path / "speller", spelling_gpt()).path
    file = tmp_path / "keys"
    file.write_text(f"ann={ANN} per-minute=3\nben={BEN}\n")
    ann, ben = ({"Authorization": f"Bearer {key}"} for key in (ANN, BEN))
    body = {"prompt": "a", "max_tokens": 1}
    long = {"prompt": "a", "max_tokens": CONTEXT_LENGTH - 1, "ignore_eos": True, "stream": True,
            "n": 16}  # fmt: skip
    with serving(checkpoint, api_key_file=file, key_at_once=1) as server:
        statuses = [server.post("/generate", body, **ann).status_code for _ in range(4)]
        assert statuses == [200, 200, 200, 429]
        refused = server.post("/v1/completions", body, **ann)
        error = ErrorReply.model_validate(refused.json()).error
        assert (error.type, error.code) == ("rate_limit_error", "rate_limit_exceeded")
        assert "'ann' may send 3 requests per minute" in error.message
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        for path in ("/info", "/metrics"):
            assert server.client.get(path, headers=ann).status_code == 200, "computes nothing"
        for path in ("/weights", "/weights/blocks.0.attention.W_QK", "/features/0"):
            for method in ("GET", "HEAD"):
                assert server.client.request(method, path, headers=ann).status_code == 429
        with server.client.stream("POST", "/generate", json=long, headers=ben) as reply:
            lines = reply.iter_lines()  # kept: without a reference, the generator closes the reply
            next(lines)
            at_once = server.post("/generate", body, **ben)
            assert at_once.status_code == 429
            assert "'ben' may have 1 concurrent requests" in at_once.text
        eventually(lambda: server.post("/generate", body, **ben).status_code == 200)
        found = {limit: server.sample("logitd_requests_rejected_total", limit=limit.value)
                 for limit in (Limit.KEY_PER_MINUTE, Limit.KEY_AT_ONCE)}  # fmt: skip
        assert found[Limit.KEY_PER_MINUTE] == 8
        assert found[Limit.KEY_AT_ONCE] >= 1


def test_disconnected_client_frees_its_place(checkpoint_path: Path) -> None:
    body = {"prompt": "a", "max_tokens": 120, "ignore_eos": True, "stream": True}
    key = {"Authorization": f"Bearer {ANN}"}
    with serving(checkpoint_path, api_keys=f"ann={ANN}", key_at_once=1) as server:
        for _ in range(3):
            with server.connect() as raw:
                raw.sendall(request_bytes("/generate", body, f"Authorization: Bearer {ANN}"))
                raw.recv(1)
            eventually(lambda: server.post("/generate", {"prompt": "a"}, **key).status_code == 200)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/generate", {"prompt": "a", "max_tokens": 1}, 200),
        ("/generate", {"prompt": "a", "max_tokens": 1, "stream": True}, 200),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "stream": True}, 200),
        ("/logits", {"prompt": "a"}, 200),
        ("/tokenize", {"prompt": "a"}, 200),
        ("/generate", {"prompt": 1}, 400),
    ],
)
def test_place_is_free_when_the_reply_ends(
    guarded: Serving, path: str, body: Any, status: int
) -> None:
    key = {"Authorization": f"Bearer {ANN}"}
    assert statuses_in_a_row(guarded, path, body, body, **key) == [status, status]
