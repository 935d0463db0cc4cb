"""Budget: whatever steps cost, prompts get the part of the target gap that decoding leaves. The
scheduler is driven on a simulated machine: the time of each plan is computed from the machine's
costs, and the clock advances by that time."""

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitd.model.inference.engine.budget import (
    MOST_DELAY,
    PASS_WORK,
    PROBE,
    STRETCH,
    UNNOTICED,
    WINDOW,
    PrefillBudget,
    Waiting,
)
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.scheduler import Scheduler, StepPlan
from logitd.model.inference.engine.sequence import Group, Sequence, State
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.interventions import Intervention
from logitd.model.inference.options import (
    DecodeSteps,
    TargetGap,
    parse_target_gap,
    parse_target_ttft,
)
from logitd.model.transformer.config import BLOCK
from tests.model.inference.engine.harness import generation, small_gpt

PROMPT = 64 * BLOCK
GROWTH = 1.5
"""Factor by which a step may exceed its limit, because prompts are rounded up to whole blocks and a
pass may cost more or less than PASS_WORK."""


@dataclass
class Machine:
    """A scheduler on a machine whose steps have these costs, in seconds. `slower` multiplies the
    time of every step. For each step with decoding sequences, `spent` lists the time of the step
    and the part of that time that decoding takes."""

    target: TargetGap | None
    chunk: int = 8 * BLOCK
    decode: float = 0.080
    block: float = 0.060
    passing: float = 0.030  # fixed cost of a step's prompt chunks
    saved: float | None = None  # seconds saved if chunks and decode rows share a pass
    row: float = 0.0  # of each decoded row, besides `decode`
    ttft: float | None = None
    slots: int = 8
    slower: float = 1.0
    now: float = 0.0
    spent: list[tuple[float, float]] = field(default_factory=list)
    scheduler: Scheduler = field(init=False)

    def __post_init__(self) -> None:
        config = EngineConfig(
            slots=self.slots,
            prefill_chunk=self.chunk,
            target_gap=self.target,
            target_ttft=self.ttft,
        )
        self.scheduler = Scheduler(config)

    def add(self, name: str, prompt: int, tokens: int = 10_000, **fields: Any) -> Sequence:
        request = generation(
            name, [len(name)] * prompt, max_tokens=tokens, prefix_reuse=False, **fields
        )
        sequence = Sequence(Group(request), 0, self.now)
        self.scheduler.enqueue(sequence)
        return sequence

    def step(self) -> StepPlan:
        plan = self.scheduler.plan(self.now)
        lengths = [chunk.end - chunk.start for chunk in plan.prefill]
        blocks = sum(-(-count // BLOCK) for count in lengths)
        prefill = self.passing + blocks * self.block if blocks else 0.0
        prefill *= self.slower
        decode = self.decode + self.row * len(plan.decode) if plan.decode else 0.0
        decode *= self.slower
        together = self.saved is not None and bool(plan.prefill and plan.decode)
        if self.saved is not None and together:
            prefill -= self.saved
        self.now += prefill + decode
        for chunk in plan.prefill:
            self.scheduler.prefilled(chunk, self.now)
            if chunk.completes_prompt:
                chunk.sequence.tokens.append(1)
        for sequence in plan.decode:
            sequence.computed += 1
            sequence.tokens.append(1)
        self.scheduler.stepped(plan, self.now, None if together else prefill, together=together)
        if plan.decode:
            self.spent.append((prefill + decode, decode))
        return plan

    def streams(self, count: int = 3) -> None:
        """Add streams, and decode until their cost is known."""
        for index in range(count):
            self.add(f"{'s' * (index + 1)}", BLOCK)
        for _ in range(count + WINDOW):
            self.step()
        self.spent.clear()


def positions(plan: StepPlan) -> int:
    return sum(chunk.end - chunk.start for chunk in plan.prefill)


def test_prompt_uses_the_rest_of_the_gap() -> None:
    """Decoding takes 80 ms of the target gap of 240 ms. The other 160 ms are enough for two blocks
    and their pass over the weights. With a fixed 256 positions per step, the streams once waited
    590 ms for each token."""
    machine = Machine(DecodeSteps(3))
    machine.streams()
    machine.add("prompt", PROMPT)
    assert [positions(machine.step()) for _ in range(4)] == [2 * BLOCK] * 4
    machine = Machine(None)
    machine.streams()
    machine.add("prompt", PROMPT)
    assert positions(machine.step()) == 8 * BLOCK
    assert machine.spent[-1][0] == pytest.approx(0.590)


def test_prefill_has_no_budget_while_nobody_decodes() -> None:
    machine = Machine(DecodeSteps(1.01))
    sequence = machine.add("prompt", PROMPT)
    while sequence.state is not State.DECODE:
        assert positions(machine.step()) == 8 * BLOCK
    machine.scheduler.remove(sequence)
    machine.add("another", PROMPT)
    assert positions(machine.step()) == 8 * BLOCK


def seconds_of_a_prompt(target: TargetGap | None, decode: float, block: float) -> float:
    """Seconds from a prompt's first chunk to its first token, while other streams decode."""
    machine = Machine(target, decode=decode, block=block, passing=PASS_WORK * block)
    machine.streams()
    prompt, began = machine.add("prompt", PROMPT), machine.now
    while prompt.state is not State.DECODE:
        machine.step()
    return machine.now - began


@given(decode=st.floats(1e-4, 10.0), block=st.floats(1e-4, 1.0))
def test_short_target_delays_no_prompt_beyond_the_limit(decode: float, block: float) -> None:
    """The target is one nanosecond. Without the limit MOST_DELAY, each step would compute only one
    block of a prompt in addition to decoding. The test allows one extra step, because the last
    chunk may be short."""
    bounded = seconds_of_a_prompt(1e-9, decode, block)
    step = decode + PASS_WORK * block
    assert bounded - step <= MOST_DELAY * seconds_of_a_prompt(None, decode, block) * (1 + 1e-9)


def test_short_prompts_share_the_time() -> None:
    """Short prompts share one pass over the weights, which is paid for once. A partly filled block
    counts as a whole block."""
    machine = Machine(DecodeSteps(5))
    machine.streams()
    for index in range(5):
        machine.add(f"short {index}", BLOCK - index)
    # Four take 270 ms of the 320, and a fifth would take 330. Apart, three would have had time.
    assert [len(machine.step().prefill) for _ in range(2)] == [4, 1]


def test_budget_ignores_one_slow_step() -> None:
    """Another process used the cores for a moment, so one step took 50 times as long."""
    machine = Machine(DecodeSteps(3))
    machine.streams()
    machine.add("prompt", PROMPT)
    machine.step()
    machine.slower = 50.0
    machine.step()
    machine.slower = 1.0
    assert [positions(machine.step()) for _ in range(WINDOW)] == [2 * BLOCK] * WINDOW


@pytest.mark.parametrize(("factor", "blocks"), [(10.0, 1), (0.2, 8)])
def test_budget_follows_the_costs_of_blocks(factor: float, blocks: int) -> None:
    """Later positions cost more, and other work on the machine varies."""
    machine = Machine(DecodeSteps(3))
    machine.streams()
    machine.add("prompt", PROMPT)
    machine.step()
    machine.block *= factor
    machine.passing *= factor
    for _ in range(WINDOW // 2 + 1):
        machine.step()
    assert positions(machine.step()) == blocks * BLOCK


def test_incomplete_blocks_count_until_whole_ones_are_measured() -> None:
    """With native kernels, a prompt of one token costs a tenth of a block. After many such prompts
    the cost of a block was underestimated, and a long prompt once took ten times the planned
    time."""
    target = DecodeSteps(11)
    budget = PrefillBudget(target, None, 8 * BLOCK)
    assert budget.work(1) == 0.0
    budget.decoded(1, 0.02)
    assert budget.work(1) == 0.0, "the cost of prompts is unknown"
    budget.prefilled([1], 0.015)
    assert budget.work(1) == pytest.approx(20.0)
    budget.prefilled([BLOCK], 0.150)
    assert budget.work(1) == pytest.approx(2.0)
    budget.prefilled([1], 0.015)
    assert budget.work(1) == pytest.approx(2.0)
    budget.prefilled([BLOCK, 2 * BLOCK], 0.100)
    assert budget.work(1) == pytest.approx(0.2 / ((0.150 / 1.5 + 0.100 / 3.5) / 2))


def test_budget_accepts_steps_that_cost_nothing() -> None:
    """The clock may stand still during a step."""
    machine = Machine(DecodeSteps(3), decode=0.0, block=0.0, passing=0.0)
    machine.streams()
    machine.add("prompt", PROMPT)
    assert positions(machine.step()) == machine.chunk


def test_prompts_in_a_pass_cost_its_time_beyond_a_decode_step() -> None:
    """Decoding takes 80 ms of the target gap of 240 ms. The other 160 ms are enough for two blocks
    in a separate pass. In the same pass as decoding, a chunk does not read the weights again, so
    more than two blocks fit."""
    apart, together = Machine(DecodeSteps(3)), Machine(DecodeSteps(3), saved=0.06)
    for machine in (apart, together):
        machine.streams()
        machine.add("prompt", PROMPT)
        for _ in range(2 * WINDOW):
            machine.step()
    assert positions(apart.step()) == 2 * BLOCK
    assert positions(together.step()) > 2 * BLOCK
    assert all(seconds <= 0.24 * GROWTH for seconds, _ in together.spent)


def test_free_pass_allows_whole_chunks() -> None:
    """A block computed together with a decode step took no longer than the decode step alone. Its
    cost of 0 was once read as unknown, so the prompts of 32 streams were computed one block at a
    time (586 instead of 747 tokens/s)."""
    budget = PrefillBudget(DecodeSteps(3), None, 8 * BLOCK)
    for _ in range(WINDOW):
        budget.decoded(3, 0.080)
        budget.together(3, [BLOCK], 0.079)
    assert budget.positions(3, []) == 8 * BLOCK


def test_small_models_compute_whole_chunks() -> None:
    """With a small model, a step of whole chunks takes a few milliseconds, a gap that nobody
    notices."""
    machine = Machine(DecodeSteps(3), decode=0.001, block=0.002, passing=0.001)
    machine.streams()
    machine.add("prompt", PROMPT)
    assert positions(machine.step()) == 8 * BLOCK
    assert machine.spent[-1][0] <= UNNOTICED


def test_clients_of_shared_passes_do_not_starve() -> None:
    """Each of 32 clients sends a new prompt as soon as its stream ends. Because prompts shared
    passes with decoding, the cost of decoding was once known only for small batches. So each step
    computed only one block of a prompt, and half of the clients kept waiting for seconds."""
    machine = Machine(DecodeSteps(4), slots=32, decode=0.006, row=0.0008, block=0.015, saved=0.004)
    machine.passing = 0.008
    waiting: list[int] = []
    streams: dict[str, Sequence] = {}
    for step in range(1500):
        if len(streams) < 32 and step % 4 == 0:
            name = f"client {len(streams)}"
            streams[name] = machine.add(name, 8 * BLOCK, 128)
        machine.step()
        for name, stream in streams.items():
            if len(stream.tokens) >= stream.longest:
                machine.scheduler.remove(stream)
                streams[name] = machine.add(name, 8 * BLOCK, 128)
        waiting.append(sum(s.state is not State.DECODE for s in streams.values()))
    assert sum(waiting[-500:]) / 500 < 3


def test_late_first_tokens_lengthen_steps() -> None:
    """A single prompt that is not late does not lengthen the gap. A queue of prompts, or a prompt
    that has waited long, lengthens the step in proportion to the delay, up to a limit. The limit
    grows with the number of waiting prompts per stream."""
    budget = PrefillBudget(1.0, 0.5, 64 * BLOCK)
    budget.decoded(2, 0.02)
    budget.prefilled([BLOCK] * 8, 0.1 * (8 + PASS_WORK))

    def stretch(*waiting: Waiting) -> float:
        return budget.work(2, waiting) * 0.1 + 0.02

    one = 0.1 * (2 + PASS_WORK)  # seconds of a prompt of two blocks
    fresh = Waiting(2 * BLOCK, 0.0)
    assert stretch(fresh) == stretch(fresh, fresh) == pytest.approx(1.0)
    assert stretch(fresh, fresh, fresh, fresh) == pytest.approx(4 * one / (0.5 + one))
    assert stretch(Waiting(2 * BLOCK, 1.0)) == pytest.approx((1.0 + one) / (0.5 + one))
    assert stretch(Waiting(2 * BLOCK, 60.0)) == pytest.approx(STRETCH)
    assert stretch(*[Waiting(2 * BLOCK, 60.0)] * 4) == pytest.approx(2 * STRETCH)
    assert stretch(Waiting(2 * BLOCK, None)) == pytest.approx(1.0), "no reader waits for its token"


def test_prompt_does_not_wait_for_a_measurement_by_interventions() -> None:
    """Steps with interventions are not recorded, so a prompt once waited for the end of a sequence
    with interventions if the cost of decoding was to be measured."""
    machine = Machine(DecodeSteps(3), saved=0.06)
    machine.add(
        "changed", BLOCK, interventions=(Intervention(stage="blocks.0.mlp.out", operation="zero"),)
    )
    machine.step()
    for _ in range(PROBE):
        machine.scheduler._budget.together(1, [BLOCK], 0.05)
    machine.add("prompt", PROMPT)
    assert sum(positions(machine.step()) for _ in range(8)) > 0


def test_cost_of_decoding_is_measured_between_shared_passes() -> None:
    budget = PrefillBudget(0.1, None, 8 * BLOCK)
    for _ in range(PROBE):
        assert budget.positions(8, []) > 0
        budget.together(8, [BLOCK], 0.05)
    assert budget.positions(8, []) == 0
    budget.decoded(8, 0.03)
    assert budget.positions(8, []) > 0


seconds = st.floats(min_value=1e-5, max_value=10.0)


@given(
    target=st.one_of(seconds, st.builds(DecodeSteps, st.floats(min_value=1.1, max_value=20.0))),
    decode=seconds,
    block=seconds,
    passing=st.floats(min_value=0.0, max_value=1.0),
    chunk=st.integers(min_value=1, max_value=64).map(lambda blocks: blocks * BLOCK),
)
def test_no_step_is_longer_than_its_bounds(
    target: TargetGap, decode: float, block: float, passing: float, chunk: int
) -> None:
    """Once costs are known, a step takes no longer than the target. If the minimum work on prompts
    takes longer than the target, the step takes no longer than that work. Every step continues a
    prompt."""
    machine = Machine(target, chunk, decode, block, passing * block)
    machine.streams()
    machine.add("prompt", WINDOW * chunk)
    for _ in range(WINDOW):
        assert positions(machine.step())
    limit = max(UNNOTICED, target.count * decode) if isinstance(target, DecodeSteps) else target
    besides = decode + passing * block
    in_whole_chunks = besides / (chunk // BLOCK) + block
    least = next(n for n in range(1, 65) if besides / n + block <= MOST_DELAY * in_whole_chunks)
    at_most = max(GROWTH * limit, besides + (GROWTH * least + 1) * block)
    assert all(spent <= at_most * (1 + 1e-9) for spent, _ in machine.spent[WINDOW // 2 + 1 :])


def test_target_gap_is_refused_on_an_asynchronous_device() -> None:
    """If the field were accepted, it would be ignored."""
    with pytest.raises(InvalidRequest, match=r"target_gap.*meta"):
        Engine(small_gpt().to("meta"), EngineConfig(target_gap=DecodeSteps(3)))


def test_time_to_a_first_token_needs_a_gap() -> None:
    with pytest.raises(InvalidRequest, match="target_ttft"):
        EngineConfig(target_ttft=0.5)


@pytest.mark.parametrize(
    ("text", "target"),
    [("3x", DecodeSteps(3)), (" 2.5 X ", DecodeSteps(2.5)), ("150ms", 0.15), ("0.2s", 0.2),
     ("none", None)],
)  # fmt: skip
def test_target_gap_is_parsed(text: str, target: TargetGap | None) -> None:
    assert parse_target_gap(text) == target


@pytest.mark.parametrize(("text", "target"), [("500ms", 0.5), (" 2 S", 2.0), ("none", None)])
def test_target_ttft_is_parsed(text: str, target: float | None) -> None:
    assert parse_target_ttft(text) == target


@pytest.mark.parametrize("text", ["", "3x", "0s", "2h", "3601s"])
def test_target_ttft_refuses_other_text(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text or "''")):
        parse_target_ttft(text)


@pytest.mark.parametrize("text", ["", "3", "1x", "0.9x", "-3x", "1001x", "0ms", "2h", "3601s", "x"])
def test_target_gap_refuses_other_text(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text or "''")):
        parse_target_gap(text)
