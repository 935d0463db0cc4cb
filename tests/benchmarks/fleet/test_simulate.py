"""The simulation, compared with queueing theory and with arithmetic by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fleet.simulate import Load, Outcome, Server, StepTimes, arrivals, simulate

FLAT = StepTimes(0.001, ((1, 0.01),))
"""Step times: 1 ms per prompt token, and 10 ms per decode step."""


def run(
    times: StepTimes, load: Load, server: Server, replicas: int = 1, count: int = 20_000
) -> Outcome:
    return simulate(times, load, server, replicas, arrivals(load, count, seed=1))


def test_single_request_takes_the_time_of_its_steps() -> None:
    """The prompt is computed in chunks of 100, 100 and 50 tokens. Four decode steps follow."""
    load, server = Load(1.0, 250, 5), Server(prefill_chunk=100, overhead=0.5)
    outcome = simulate(FLAT, load, server, 1, [3.0])
    assert outcome.first_tokens == pytest.approx((0.25 + 0.5,))
    assert outcome.inter_token == pytest.approx(0.01)
    assert (outcome.tokens, outcome.rejected) == (5, 0)
    assert outcome.seconds == pytest.approx(0.25 + 4 * 0.01)
    assert outcome.busy == pytest.approx(1.0)


@pytest.mark.parametrize("use", [0.3, 0.6, 0.85])
def test_server_of_one_slot_waits_like_an_m_d_1_queue(use: float) -> None:
    """M/D/1: with utilization `use`, the mean wait is use / (2 (1 - use)) service times, by the
    Pollaczek-Khinchine formula."""
    service = 0.1
    load, server = Load(use / service, 100, 1), Server(slots=1, max_queue=10**6)
    outcome = run(FLAT, load, server, count=60_000)
    waits = sum(outcome.first_tokens) / len(outcome.first_tokens) - service
    assert waits == pytest.approx(service * use / (2 * (1 - use)), rel=0.1)
    assert outcome.busy == pytest.approx(use, rel=0.05)


@given(
    rate=st.floats(0.5, 500), prompt=st.integers(1, 600), tokens=st.integers(1, 40),
    slots=st.integers(1, 8), queue=st.integers(0, 6), replicas=st.integers(1, 4),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_simulation_loses_no_request_and_speeds_up_none(
    rate: float, prompt: int, tokens: int, slots: int, queue: int, replicas: int, seed: int
) -> None:
    load, server = Load(rate, prompt, tokens), Server(slots=slots, max_queue=queue)
    moments = arrivals(load, 60, seed)
    outcome = simulate(FLAT, load, server, replicas, moments)
    assert len(outcome.first_tokens) + outcome.rejected == 60
    assert outcome.tokens == len(outcome.first_tokens) * tokens
    assert outcome.first_tokens[0] >= prompt * 0.001 - 1e-9
    assert 0 < outcome.busy <= 1 + 1e-9
    if tokens > 1:
        assert outcome.inter_token >= 0.01 - 1e-9
    assert simulate(FLAT, load, server, replicas, moments) == outcome
