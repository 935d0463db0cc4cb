"""Comparison of servers: counted tokens, and peers that are left out."""

import pytest

from benchmarks.peers.serving import LOGITD, PLAIN, Unmeasured, overall_rate, summarize
from benchmarks.streams import Arrival, Failure, StreamRecord


def stream(sent: float, *times: float) -> StreamRecord:
    return StreamRecord(sent, tuple(Arrival(at, 1) for at in times))


TOGETHER = [stream(0.0, 1.0, 2.0, 3.0, 4.0), stream(0.5, 2.0, 3.0, 4.0, 5.0)]
ONE_BY_ONE = [stream(0.0, 1.0, 2.0), stream(0.0, 3.0, 4.0)]


def test_figures_of_a_batch_equal_those_by_hand() -> None:
    found = summarize([TOGETHER], LOGITD, "float32", 2)
    # From 2 to 4 both decode: two tokens of each.
    assert found.decode_tokens_per_second == 2.0
    assert found.tokens_per_second == overall_rate(TOGETHER) == 8 / 5
    assert (found.tokens, found.first_token_p50) == (8, 1.25)


def test_streams_that_come_one_after_the_other_never_decode_together() -> None:
    found = summarize([ONE_BY_ONE], PLAIN, "float32", 2)
    assert (found.decode_tokens_per_second, found.tokens_per_second) == (None, 1.0)


def test_serving_leaves_out_a_server_with_a_failure() -> None:
    failed = StreamRecord(0.0, (), Failure("TokensMissing", "3 of 4 tokens arrived"))
    with pytest.raises(Unmeasured, match=r"batch 2: 1 of 4.*TokensMiss"):
        summarize([TOGETHER, [TOGETHER[0], failed]], LOGITD, "float32", 2)
