"""In process: the steps that are timed are those of a whole batch, and every token is generated.
How long they take, no test knows."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from logitd.model.benchmark.in_process import (
    MeasuringError,
    full_steps,
    measure_engine,
    requests,
)
from logitd.model.benchmark.work import decode_work, prefill_work, size_of
from logitd.model.benchmark.workload import Workload, tokens_for
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.kernels.eager.decoder import PlainDecoder
from logitd.model.transformer.gpt import GPT
from tests.model.factories import VOCAB_SIZE, tiny_config, tiny_gpt

STEPS = 9


@pytest.fixture(scope="module")
def gpt() -> GPT:
    return tiny_gpt(tiny_config(context_length=256))


def workload(batch: int, prompt: int, **changed: Any) -> Workload:
    values: dict[str, Any] = {
        "batches": (batch,),
        "prompt_tokens": prompt,
        "tokens": tokens_for(STEPS, batch=batch, prompt_tokens=prompt, prefill_chunk=64),
        "rounds": 1,
        "vocab_size": VOCAB_SIZE,
        "prefill_chunk": 64,
    }
    return Workload(**(values | changed))


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("prompt", [1, 31, 32, 33, 64, 100])
def test_as_many_whole_steps_as_were_wanted(gpt: GPT, batch: int, prompt: int) -> None:
    """What `tokens_for` computes is what the engine does, and positions are counted exactly."""
    asked = workload(batch, prompt)
    engine = Engine(gpt, EngineConfig(slots=batch, prefill_chunk=64))
    steps = full_steps(engine, requests(asked, batch, "x"))
    assert len(steps) == STEPS
    assert all(step.seconds > 0 for step in steps)
    # Each step attends over one position more in each sequence, up to all but the last token's.
    live = [step.live_positions for step in steps]
    assert [later - earlier for earlier, later in itertools.pairwise(live)] == [batch] * 8
    if batch == 1:
        assert live == list(range(prompt + 1, prompt + 1 + STEPS))


def test_positions_count_the_lead_of_the_first(gpt: GPT) -> None:
    """Three prompts of a chunk each: two, one and no tokens ahead when the last is computed."""
    engine = Engine(gpt, EngineConfig(slots=3, prefill_chunk=64))
    steps = full_steps(engine, requests(workload(3, 64), 3, "x"))
    assert steps[0].live_positions == 3 * 64 + 3 + 2 + 1


def test_a_sequence_that_ends_otherwise_is_an_error(gpt: GPT) -> None:
    class Failing(PlainDecoder):
        def decode(self, *args: Any) -> Any:
            raise ZeroDivisionError("on purpose")

    engine = Engine(gpt, EngineConfig(slots=1, prefill_chunk=64), make_decoder=Failing)
    with pytest.raises(MeasuringError, match=r"ended by error: .*on purpose"):
        full_steps(engine, requests(workload(1, 8), 1, "x"))


def test_all_cases_are_measured(gpt: GPT) -> None:
    asked = workload(4, 40, batches=(1, 4), rounds=2)
    lines: list[str] = []
    figures = measure_engine(gpt, PlainDecoder, asked, log=lines.append)
    assert len(lines) == 4
    assert [load.prompts for load in figures.prefill] == [1, 4]
    assert [load.batch for load in figures.decode] == [1, 4]
    size = size_of(gpt)
    for prefill in figures.prefill:
        assert prefill.tokens_per_second > 0
        assert prefill.work == prefill_work(size, prompts=prefill.prompts, length=40)
    alone, batch = figures.decode
    assert alone.steps == 2 * (asked.tokens - 1)
    assert batch.steps == 2 * STEPS
    # Alone from its second token on: 41 to 39 + tokens positions.
    mean = 40 + asked.tokens / 2
    assert alone.work == decode_work(size, batch=1, live_positions=mean)
    assert 0 < batch.step.p50 <= batch.step.p99


def test_rates_are_tokens_over_the_time_of_whole_steps(
    gpt: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that is moved on by hand: a thousand seconds for each look at it."""

    def ticking() -> Iterator[float]:
        now = 0.0
        while True:
            yield now
            now += 1000.0

    clock = ticking().__next__
    monkeypatch.setattr("logitd.model.benchmark.in_process.time.perf_counter", clock)
    asked = workload(4, 40, batches=(4,), rounds=3)
    figures = measure_engine(gpt, PlainDecoder, asked)
    (decode,) = figures.decode
    assert decode.tokens_per_second == pytest.approx(4 / 1000)
    assert (decode.step.p50, decode.step.p99) == (1000.0, 1000.0)
    # A prefill of one prompt is one step, two looks, within two looks around it.
    assert figures.prefill[0].tokens_per_second == pytest.approx(40 / 3000)


def test_int8_is_held_against_its_own_bytes(gpt: GPT) -> None:
    asked = workload(1, 40)
    plain = measure_engine(gpt, PlainDecoder, asked).decode[0].work
    quantized = measure_engine(gpt, PlainDecoder, asked, quantize="int8").decode[0].work
    assert quantized.read_bytes < plain.read_bytes
    assert quantized.operations is None
