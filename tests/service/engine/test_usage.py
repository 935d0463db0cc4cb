"""Usage: sums and finish reasons of a request's sequences, and the moment when all have ended."""

from logitd.model.inference.engine.events import FinishEvent, FinishReason, SequenceTimes
from logitd.model.inference.engine.requests import GenerationRequest, OutputsRequest
from logitd.model.inference.sampling.params import SamplingParams
from logitd.service.engine.usage import Usage


def generation(name: str, n: int = 1) -> GenerationRequest:
    params = SamplingParams(max_tokens=4, seed=0)
    return GenerationRequest(request_id=name, token_ids=(1, 2), params=params, n=n)


def finish(name: str, index: int, reason: FinishReason) -> FinishEvent:
    times = SequenceTimes(0.0, 1.0, 2.0, 3.0)
    return FinishEvent(name, index, reason, times, 2, 0, 4)


def test_reasons_are_in_the_order_of_the_reply() -> None:
    usage = Usage()
    usage.begin([generation("a", 2), generation("b")], 3)
    usage.end(finish("b", 0, FinishReason.LENGTH))
    usage.end(finish("a", 1, FinishReason.STOP))
    assert list(usage.reasons.values()) == [None, FinishReason.STOP, FinishReason.LENGTH]
    usage.end(finish("a", 0, FinishReason.ABORT))
    assert list(usage.reasons.values()) == [
        FinishReason.ABORT, FinishReason.STOP, FinishReason.LENGTH,
    ]  # fmt: skip
    assert usage.failed is None


def test_sequence_that_reached_a_stop_string_has_not_failed() -> None:
    """The reply has its text and the reason "stop". Its deadline may pass before the engine ends
    it, also before the stop string is found."""
    usage = Usage()
    usage.begin([generation("a", 3)], 3)
    usage.stop("a", 0)
    usage.end(finish("a", 0, FinishReason.TIMEOUT))
    usage.end(finish("a", 1, FinishReason.TIMEOUT))
    usage.stop("a", 1)
    assert list(usage.reasons.values()) == [FinishReason.STOP, FinishReason.STOP, None]
    assert [usage.failed] == [None]
    usage.end(finish("a", 2, FinishReason.TIMEOUT))
    assert usage.failed is not None
    assert usage.failed.index == 2


def test_usage_is_settled_after_the_last_sequence() -> None:
    usage, told = Usage(), list[str]()
    usage.begin([generation("a", 2)], 2)
    usage.when_settled(lambda: told.append("settled"))
    usage.end(finish("a", 0, FinishReason.LENGTH))
    assert told == []
    usage.end(finish("a", 1, FinishReason.TIMEOUT))
    assert told == ["settled"]
    assert usage.failed is not None
    assert usage.failed.reason is FinishReason.TIMEOUT
    usage.when_settled(lambda: told.append("at once"))
    assert told == ["settled", "at once"]


def test_failed_engine_leaves_nothing_open() -> None:
    usage, told = Usage(), list[str]()
    usage.begin([OutputsRequest(request_id="a", token_ids=(1,), positions=(0,))], 1)
    usage.when_settled(lambda: told.append("settled"))
    usage.lose(1)
    assert told == ["settled"]
    assert usage.lost
    assert usage.reasons == {}, "rows are not generated"
    ended = Usage()
    ended.begin([generation("a")], 1)
    ended.end(finish("a", 0, FinishReason.STOP))
    ended.lose(0)
    assert not ended.lost
