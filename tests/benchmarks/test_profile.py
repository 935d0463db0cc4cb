"""Profile: every part of a native step is in a stage, and profiling changes no token."""

import ctypes
from typing import Any

import pytest

from benchmarks.profile import (
    OUTSIDE,
    STAGES,
    Timeline,
    Watch,
    WatchedStep,
    middle_half,
    profile_engine,
    run_watched,
    summarize,
    summed,
)
from logitd.model.benchmark.rates import BenchmarkError, Workload
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.events import TokenEvent
from logitd.model.inference.engine.runner import DecoderMaker
from logitd.model.inference.kernels.cpu.decoder import NativeDecoder
from logitd.model.inference.kernels.cpu.library import KernelsUnavailable, load_library
from logitd.model.inference.kernels.eager.decoder import PlainDecoder
from logitd.model.transformer.gpt import GPT
from tests.model.factories import FAMILIES, VOCAB_SIZE, tiny_config, tiny_gpt

ASKED = Workload(
    batches=(1, 3), prompt_tokens=40, tokens=20, rounds=1, vocab_size=VOCAB_SIZE, prefill_chunk=32
)


@pytest.fixture(scope="module")
def decoder() -> DecoderMaker:
    try:
        library: ctypes.CDLL = load_library().functions
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
    return lambda gpt, cache: NativeDecoder(library, gpt, cache, threads=2)


def small(family: str) -> GPT:
    return tiny_gpt(tiny_config(**FAMILIES[family], head_dim=16))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_stages_add_up_to_the_step(decoder: DecoderMaker, family: str) -> None:
    """Starting and ending the profile is not in a stage, so the sum may exceed the whole. A pause
    of the machine can be longer than a step of microseconds, so there are five attempts; a missing
    or doubled stage fails all five."""
    for _ in range(5):
        profiles = profile_engine(decoder, small(family), ASKED)
        if all(abs(profile.remainder_us) < 0.5 * profile.step_us for profile in profiles):
            break
    else:
        pytest.fail(f"the stages are not the step: {profiles}")
    cases = [(profile.case, profile.batch) for profile in profiles]
    assert cases == [("prefill", 1), ("decode", 1), ("decode", 3)]
    for profile in profiles:
        assert tuple(profile.stages_us) == STAGES
        assert min(profile.stages_us.values()) > 0
        overhead = sum(profile.stages_us[stage] for stage in OUTSIDE)
        assert profile.overhead_us == pytest.approx(overhead)


def test_watching_changes_no_token(decoder: DecoderMaker) -> None:
    def tokens(watched: bool) -> list[Any]:
        watch = Watch(decoder)
        made = watch.make_decoder if watched else decoder
        engine = Engine(small("llama"), EngineConfig(slots=3), make_decoder=made)
        for request in ASKED.requests(3, "same"):
            engine.add(request)
        found = []
        while engine.has_work():
            if watched:
                with watch.step():
                    events = engine.step().events
            else:
                events = engine.step().events
            found += [
                (event.request_id, event.token_id)
                for event in events
                if isinstance(event, TokenEvent)
            ]
        engine.close()
        return sorted(found)

    assert tokens(watched=True) == tokens(watched=False)


def test_every_other_step_is_watched(decoder: DecoderMaker) -> None:
    watch = Watch(decoder)
    engine = Engine(small("gpt2"), EngineConfig(slots=1), make_decoder=watch.make_decoder)
    steps = run_watched(engine, watch, ASKED.requests(1, "x"))
    engine.close()
    assert [step.stages is not None for step in steps] == [True, False] * 10
    assert [step.prefilled for step in steps] == [40] + [0] * 19


def test_decoder_in_plain_torch_is_refused() -> None:
    with pytest.raises(BenchmarkError, match="native"):
        profile_engine(PlainDecoder, small("gpt2"), ASKED)


# Figures computed from steps


def watched_step(length: float, **stages: float) -> WatchedStep:
    return WatchedStep(length, 0, 1, stages)


def test_only_the_middle_half_counts() -> None:
    steps = [watched_step(length) for length in (9.0, 1.0, 5.0, 4.0, 6.0, 5.5, 0.5, 100.0)]
    assert sorted(step.seconds for step in middle_half(steps)) == [4.0, 5.0, 5.5, 6.0]
    assert len(middle_half(steps[:1])) == 1
    assert len(middle_half(steps[:3])) == 3


def test_profile_by_hand() -> None:
    steps = [
        watched_step(10.0, scheduling=1.0, head=6.0, events=2.0),
        watched_step(12.0, scheduling=1.0, head=8.0, events=2.0),
        WatchedStep(10.0, 0, 1, None),
    ]
    profile = summarize(steps, "decode", 1)
    found = {stage: us / 1e6 for stage, us in profile.stages_us.items() if us}
    assert found == {"scheduling": 1.0, "head": 7.0, "events": 2.0}
    assert (profile.step_us, profile.remainder_us, profile.overhead_us) == (11e6, 1e6, 3e6)
    assert profile.watching == pytest.approx(0.1)
    assert profile.steps == 2


def test_steps_of_a_prompt_are_added_up() -> None:
    whole = summed([watched_step(1.0, head=0.5), watched_step(2.0, head=1.0, sampling=0.25)])
    assert (whole.seconds, whole.stages) == (3.0, {"head": 1.5, "sampling": 0.25})
    assert summed([WatchedStep(1.0, 32, 0, None)]).stages is None


def test_timeline_by_a_clock_that_is_moved_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 6.0, 8.0, 12.0, 13.0])
    monkeypatch.setattr("benchmarks.profile.time.perf_counter", lambda: next(times))
    timeline = Timeline()
    timeline.mark("head")  # not profiled: the clock is not read
    timeline.begin()
    timeline.mark("scheduling")
    # After this mark a reading takes 2 seconds, which belong to no stage.
    timeline.mark("tensors", lambda: {"qkv": 2.0, "head": 1.5, "sampling": 0.0})
    timeline.mark("scheduling")
    assert timeline.end("events") == {
        "scheduling": 5.0, "qkv": 2.0, "head": 1.5, "tensors": 1.5, "events": 1.0,
    }  # fmt: skip
    assert timeline.seconds is None
