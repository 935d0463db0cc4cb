"""Rates: only steps with a full batch are timed, and every requested token is generated."""

import itertools
from typing import Any

import pytest

from logitd.model.benchmark.rates import (
    FEWEST_STEPS,
    BenchmarkError,
    Workload,
    full_steps,
    measure_engine,
)
from logitd.model.benchmark.work import decode_work, limit, prefill_work
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.kernels.eager.decoder import PlainDecoder
from logitd.model.machine import Machine
from logitd.model.transformer.gpt import GPT
from tests.model.factories import VOCAB_SIZE, tiny_config, tiny_gpt

STEPS = 9
MACHINE = Machine(read_bandwidth=1e9, matrix_rate=1e9)


@pytest.fixture(scope="module")
def gpt() -> GPT:
    return tiny_gpt(tiny_config(context_length=256))


def ahead(batch: int, prompt: int) -> int:
    """How many tokens the first sequence is ahead of the last one when the last prefill ends, if
    each step computes 64 prompt positions."""
    blocks = -(-prompt // 32)
    return -(-batch * blocks // 2) - -(-blocks // 2)


def workload(batch: int, prompt: int, **changed: Any) -> Workload:
    values: dict[str, Any] = {
        "batches": (batch,),
        "prompt_tokens": prompt,
        "tokens": 1 + STEPS + ahead(batch, prompt),
        "rounds": 1,
        "vocab_size": VOCAB_SIZE,
        "prefill_chunk": 64,
    }
    return Workload(**(values | changed))


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("prompt", [1, 31, 32, 33, 64, 100])
def test_whole_steps_are_counted(gpt: GPT, batch: int, prompt: int) -> None:
    asked = workload(batch, prompt)
    engine = Engine(gpt, EngineConfig(slots=batch, prefill_chunk=64))
    steps = full_steps(engine, asked.requests(batch, "x"))
    assert len(steps) == STEPS
    assert all(seconds > 0 and tokens == batch for seconds, tokens, _ in steps)
    # Each step attends to one position more in each sequence.
    live = [positions for *_, positions in steps]
    assert [later - earlier for earlier, later in itertools.pairwise(live)] == [batch] * 8
    if batch == 1:
        assert live == list(range(prompt + 1, prompt + 1 + STEPS))


def test_positions_include_the_lead_of_the_first(gpt: GPT) -> None:
    """Each of the three prompts is one chunk long. So when the last prefill ends, the sequences are
    two, one and zero tokens ahead of the last one."""
    engine = Engine(gpt, EngineConfig(slots=3, prefill_chunk=64))
    steps = full_steps(engine, workload(3, 64).requests(3, "x"))
    assert steps[0][-1] == 3 * 64 + 3 + 2 + 1


def test_failed_sequence_is_an_error(gpt: GPT) -> None:
    class Failing(PlainDecoder):
        def decode(self, *args: Any) -> Any:
            raise ZeroDivisionError("on purpose")

    engine = Engine(gpt, EngineConfig(slots=1, prefill_chunk=64), make_decoder=Failing)
    with pytest.raises(BenchmarkError, match=r"ended with error: .*on purpose"):
        full_steps(engine, workload(1, 8).requests(1, "x"))


def test_rates_are_shares_of_their_limits(gpt: GPT) -> None:
    asked = workload(4, 40, batches=(1, 4), rounds=2)
    prefill, decode = measure_engine(gpt, PlainDecoder, asked, MACHINE)
    assert [rate.batch for rate in prefill] == [rate.batch for rate in decode] == [1, 4]
    for rate in prefill:
        least, by = limit(prefill_work(gpt, prompts=rate.batch, length=40), MACHINE)
        assert rate.limited_by == by
        assert rate.share_of_limit is not None
        assert rate.share_of_limit * 40 * rate.batch / least == pytest.approx(
            rate.tokens_per_second
        )
    # A single sequence attends to 41 up to 39 + tokens positions.
    alone = decode_work(gpt, batch=1, live_positions=40 + asked.tokens / 2)
    least, _ = limit(alone, MACHINE)
    assert decode[0].share_of_limit is not None
    assert decode[0].share_of_limit / least == pytest.approx(decode[0].tokens_per_second)


def test_rates_are_tokens_over_the_time_of_whole_steps(
    gpt: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock advances by a thousand seconds per reading."""

    clock = itertools.count(0.0, 1000.0).__next__
    monkeypatch.setattr("logitd.model.benchmark.rates.time.perf_counter", clock)
    prefill, (decode,) = measure_engine(
        gpt, PlainDecoder, workload(4, 40, rounds=3), MACHINE
    )  # fmt: skip
    assert decode.tokens_per_second == pytest.approx(4 / 1000)
    # A prefill of one prompt is one step with two readings, between two more.
    assert prefill[0].tokens_per_second == pytest.approx(40 / 3000)


def test_too_few_steps_of_a_whole_batch_are_refused(gpt: GPT) -> None:
    tokens = ahead(4, 40) + FEWEST_STEPS
    with pytest.raises(BenchmarkError, match=rf"4 sequences .* 7 steps.*--tokens.* {tokens},"):
        measure_engine(gpt, PlainDecoder, workload(4, 40, tokens=tokens), MACHINE)


def test_prompts_depend_on_the_case_and_share_no_prefix() -> None:
    asked = workload(32, 200)
    prompts = asked.prompts(32, "a")
    assert prompts == asked.prompts(32, "a")
    assert len({prompt[:4] for prompt in [*prompts, *asked.prompts(32, "b")]}) == 64
    assert {len(prompt) for prompt in prompts} == {200}
    assert {token_id for prompt in prompts for token_id in prompt} == set(range(VOCAB_SIZE))
