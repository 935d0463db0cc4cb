"""Reading and ReplyProgress: bookkeeping of a connection."""

from collections.abc import Callable
from functools import partial

from logitd.service.body_writer import MIN_BYTES_PER_SECOND
from logitd.service.connections.reading import (
    FRAMING_PER_BODY_BYTE,
    MAX_RAW_HEADER_BYTES,
    Reading,
    ReadState,
    ReplyProgress,
)


def test_request_passes_through_its_states() -> None:
    reading = Reading(1.0)
    states = [(reading.state, reading.since)]
    changes: list[Callable[[], None]] = [
        partial(reading.begin_head, 2.0),
        partial(reading.begin_body, 3.0),
        reading.end_message,
        reading.stop,
    ]
    for change in changes:
        change()
        states.append((reading.state, reading.since))
    assert states == [
        (ReadState.REQUEST, 1.0),
        (ReadState.HEAD, 2.0),
        (ReadState.BODY, 2.0),
        (ReadState.REQUEST, 2.0),
        (ReadState.NOTHING, 2.0),
    ]


def test_framing_is_bounded_by_its_body() -> None:
    reading = Reading(0.0)
    reading.begin_head(0.0)
    assert not reading.is_too_large(MAX_RAW_HEADER_BYTES)
    assert reading.is_too_large(1)
    reading.begin_body(0.0)
    assert not reading.is_too_large(10**9), "a piece that completes a head is not counted"
    reading.add_body(10)
    assert not reading.is_too_large(10 + MAX_RAW_HEADER_BYTES + 10 * FRAMING_PER_BODY_BYTE)
    assert reading.is_too_large(1)


def test_reader_without_acknowledgements_must_read_something() -> None:
    progress = ReplyProgress()
    assert not progress.is_too_slow(0.0, 5.0, unsent=100, acknowledged=None, complete=True)
    assert not progress.is_too_slow(4.0, 5.0, unsent=99, acknowledged=None, complete=True)
    assert not progress.is_too_slow(9.0, 5.0, unsent=99, acknowledged=None, complete=True)
    assert progress.is_too_slow(9.1, 5.0, unsent=99, acknowledged=None, complete=True)
    assert not progress.is_too_slow(9.1, 5.0, unsent=99, acknowledged=None, complete=False)
    assert not progress.is_too_slow(9.1, 5.0, unsent=0, acknowledged=None, complete=True)


def test_reader_with_acknowledgements_must_keep_a_rate() -> None:
    progress, enough = ReplyProgress(), 5 * MIN_BYTES_PER_SECOND
    assert not progress.is_too_slow(0.0, 5.0, unsent=100, acknowledged=0, complete=True)
    assert not progress.is_too_slow(5.0, 5.0, unsent=100, acknowledged=enough, complete=True)
    assert progress.is_too_slow(10.1, 5.0, unsent=100, acknowledged=2 * enough - 1, complete=True)
