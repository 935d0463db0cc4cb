"""Closed loop: what counts and what does not, by hand; and a small run against real servers."""

import itertools
import json

import pytest

from benchmarks.closed_loop import (
    Load,
    Observed,
    Question,
    figures_of,
    main,
    prompts_of,
    table,
    tokens_after,
)
from service.commands.benchmark.load import Arrival, Failure, StreamFailed, StreamRecord

QUESTION = Question(prompt_tokens=8, tokens=4, shared=0.5, seconds=1.0, warm_up=0.0)


def stream(sent: float, *times: float) -> StreamRecord:
    return StreamRecord(sent, tuple(Arrival(at, 1) for at in times))


def test_what_happened_in_the_time_that_counts() -> None:
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
    assert "| a | 3 | 3 | 1 | 0.3 | 1,000 |" in table([figures])


def test_a_target_that_answers_nothing_has_a_row() -> None:
    observed = Observed()
    observed.add([StreamRecord(1.0, (), Failure("ConnectError", "refused"))], 0.0, 2.0)
    assert "| a | 0.5/s | 0 | 1 | 0.0 |  |  |" in table([figures_of("a", Load(rate=0.5), observed)])


def test_prompts_share_what_they_should_and_no_more() -> None:
    first, second = itertools.islice(prompts_of(QUESTION, 250, "a"), 2)
    other = next(prompts_of(QUESTION, 250, "b"))
    assert first[:4] == second[:4] == other[:4]
    assert len({tuple(prompt[4:]) for prompt in (first, second, other)}) == 3
    assert {len(first), len(second), len(other)} == {8}


@pytest.mark.parametrize(
    ("line", "after"),
    [
        ('data: {"choices": [{"text": "a"}], "usage": {"completion_tokens": 9}}', 9),
        ('data: {"choices": [], "usage": {"completion_tokens": 7}}', 7),
        ('data: {"choices": [{"text": "a"}]}', 6),
        ('data: {"choices": [{"text": "", "finish_reason": "length"}], "usage": null}', 5),
        ("data: [DONE]", 5),
        (": keep-alive", 5),
        ("", 5),
    ],
)
def test_tokens_of_a_line(line: str, after: int) -> None:
    assert tokens_after(line, 5) == after


@pytest.mark.parametrize("line", ['data: {"error": "no"}', "data: {", "data: 3", 'data: {"a": 1}'])
def test_a_line_that_says_nothing_fails_the_stream(line: str) -> None:
    with pytest.raises(StreamFailed):
        tokens_after(line, 5)


@pytest.mark.parametrize(
    "flags", [["--shared", "2"], ["--clients", "0"], ["--rate", "0"], ["--seconds", "0"]]
)
def test_what_cannot_be_measured_is_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(flags)


@pytest.mark.slow
def test_a_small_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The bundled checkpoint, by two servers, with clients and at a rate."""
    flags = [
        "--threads", "1", "--serve=--slots 2", "--serve=--slots 2 --target-gap none",
        "--clients", "3", "--rate", "20", "--prompt-tokens", "70", "--tokens", "5",
        "--shared", "0.5", "--seconds", "0.5", "--warm-up", "0.3", "--rounds", "1",
    ]  # fmt: skip
    assert main(flags) == 0
    said = capsys.readouterr().out
    results = json.loads(said.splitlines()[-1])["results"]
    assert [(result["target"], result["load"]) for result in results] == [
        ("logitd serve --slots 2", "3"),
        ("logitd serve --slots 2 --target-gap none", "3"),
        ("logitd serve --slots 2", "20/s"),
        ("logitd serve --slots 2 --target-gap none", "20/s"),
    ]
    assert all(result["failed"] == 0 for result in results)
    assert all(result["tokens_per_second"] > 0 for result in results)
    assert said.count("| logitd serve") == 4
