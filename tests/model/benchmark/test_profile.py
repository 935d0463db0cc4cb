"""Profile: every part of a step is in a stage, each stage is what it is called, and looking on
changes nothing. How long anything takes, no test knows, but for what dwarfs the rest."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from logitd.model.benchmark.profile import (
    Profile,
    ProfileError,
    WatchedStep,
    middle_half,
    profile_engine,
    run_watched,
    summarise,
    summed,
)
from logitd.model.benchmark.stages import Stage, decode_stage_works, prefill_stage_works
from logitd.model.benchmark.timeline import Timeline, Watch
from logitd.model.benchmark.work import Work
from logitd.model.benchmark.workload import Workload, tokens_for
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.events import TokenEvent
from logitd.model.inference.engine.requests import GenerationRequest
from logitd.model.inference.engine.runner import DecoderMaker
from logitd.model.inference.kernels.cpu.decoder import NativeDecoder
from logitd.model.inference.kernels.cpu.library import KernelsUnavailable, load_library
from logitd.model.inference.kernels.eager.decoder import PlainDecoder
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.transformer.gpt import GPT
from tests.model.factories import FAMILIES, VOCAB_SIZE, random_ids, tiny_config, tiny_gpt

STEPS = 12
ROWS: set[Stage] = {"norms", "attention", "activation"}
PRODUCTS: set[Stage] = {"qkv", "attention_out", "mlp_up", "mlp_down", "head"}
OF_A_STEP: set[Stage] = {
    "scheduling", "tensors", "embedding", *ROWS, *PRODUCTS, "processing", "sampling", "events",
}  # fmt: skip


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    try:
        return load_library().functions
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(params=["native", pytest.param("torch", marks=pytest.mark.slow)])
def decoder(request: pytest.FixtureRequest) -> DecoderMaker:
    """Each way of decoding."""
    if request.param == "torch":
        return PlainDecoder
    library = request.getfixturevalue("library")
    return lambda gpt, cache: NativeDecoder(library, gpt, cache, threads=2)


def small(family: str = "gpt2", **changed: Any) -> GPT:
    return tiny_gpt(tiny_config(**{**FAMILIES[family], "head_dim": 16, **changed}))


def workload(**changed: Any) -> Workload:
    values: dict[str, Any] = {
        "batches": (1, 3),
        "prompt_tokens": 40,
        "tokens": tokens_for(STEPS, batch=3, prompt_tokens=40, prefill_chunk=32),
        "rounds": 1,
        "vocab_size": VOCAB_SIZE,
        "prefill_chunk": 32,
    }
    return Workload(**(values | changed))


def seconds(profile: Profile) -> dict[Stage, float]:
    return {stage.stage: stage.seconds for stage in profile.stages}


# Whole profiles


@pytest.mark.parametrize("family", FAMILIES)
def test_the_stages_are_the_step(decoder: DecoderMaker, family: str) -> None:
    """What begins and ends the watching is outside, so the sum may be above the whole. Where a step
    takes microseconds, a pause of the machine in the wrong place is more than the step: so there
    are five attempts, and a stage that is left out or counted twice is so in each."""
    gpt = small(family)
    for _ in range(5):
        prefill, alone, batch = profiles = profile_engine(gpt, decoder, workload())
        if all(abs(profile.remainder) < 0.5 * profile.seconds for profile in profiles):
            break
    else:
        pytest.fail(f"the stages are not the step: {[profile.remainder for profile in profiles]}")
    assert (prefill.prompt_tokens, prefill.batch) == (40, 1)
    assert [alone.batch, batch.batch] == [1, 3]
    assert set(seconds(alone)) == set(seconds(batch)) == OF_A_STEP
    plain: set[Stage] = {"cache_writes"} if decoder is PlainDecoder else set()
    assert set(seconds(prefill)) == OF_A_STEP | plain
    for profile in (prefill, alone, batch):
        assert all(stage.seconds > 0 for stage in profile.stages)
        assert profile.remainder == pytest.approx(profile.seconds - sum(seconds(profile).values()))
        outside: tuple[Stage, ...] = ("scheduling", "tensors", "processing", "events")
        assert profile.overhead == pytest.approx(sum(seconds(profile)[stage] for stage in outside))
        assert profile.steps >= 5
    works = prefill_stage_works(gpt, length=40)
    assert {stage.stage: stage.work for stage in prefill.stages if stage.work} == works
    known = decode_stage_works(gpt, batch=3, live_positions=1)
    assert {stage.stage for stage in batch.stages if stage.work} == set(known)


@pytest.mark.parametrize(
    ("largest", "changed"),
    [
        ("head", {"vocab_size": 40_000, "n_layer": 1}),
        ("mlp_up", {"d_ff": 20_000, "d_model": 256, "activation": "swiglu", "n_layer": 1}),
        ("qkv", {"n_head": 60, "n_layer": 1, "d_model": 2000, "d_ff": 16}),
        pytest.param(
            "attention",
            {"n_layer": 1, "d_model": 16, "n_head": 1, "context_length": 4000,
             "d_ff": 16, "positions": "sinusoidal"},
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_stage_is_what_it_is_called(
    decoder: DecoderMaker, largest: Stage, changed: dict[str, Any]
) -> None:
    """A model nearly all of which is one stage. Their weights are left as they are made: it is the
    time that matters. On a busy machine a pause may fall into another stage, so that there are five
    attempts; under a wrong name the stage would never be the largest."""
    config = tiny_config(**{"head_dim": 16, **changed})
    gpt = GPT(config).eval().requires_grad_(False)
    prompt = config.context_length - 60 if largest == "attention" else 4
    asked = workload(batches=(3,), prompt_tokens=prompt, vocab_size=200, prefill_chunk=32_000)
    stages = set[Stage]()
    for _ in range(5):
        _, profile = profile_engine(gpt, decoder, asked)
        inside = {name: took for name, took in seconds(profile).items() if name in ROWS | PRODUCTS}
        stages.add(max(inside, key=lambda stage: inside[stage]))
        if largest in stages:
            break
    assert largest in stages


def test_another_device_is_refused() -> None:
    with torch.device("meta"):
        gpt = GPT(tiny_config())
    with pytest.raises(ProfileError, match="the model is on meta"):
        profile_engine(gpt, PlainDecoder, workload())


# What is looked at stays as it is


def tokens(engine: Engine, run: Callable[[Engine], Any]) -> list[tuple[str, int, Any]]:
    tokens = []
    while engine.has_work():
        for event in run(engine).events:
            if isinstance(event, TokenEvent):
                tokens.append((event.request_id, event.token_id, event.chosen))
    return tokens


def asked(count: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=str(index),
            token_ids=tuple(random_ids(20 + 30 * index, seed=index).tolist()),
            params=SamplingParams(max_tokens=15, seed=index, logprobs=0),
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_watching_changes_no_bit(decoder: DecoderMaker, family: str) -> None:
    gpt = small(family)
    answers = []
    for watched in (True, False):
        watch = Watch(gpt, decoder)
        engine = Engine(gpt, EngineConfig(slots=3), make_decoder=watch.make_decoder)

        def step(engine: Engine, on: bool = watched, watch: Watch = watch) -> Any:
            if not on:
                return engine.step()
            with watch.step(prefill=True):
                return engine.step()

        for request in asked(3):
            engine.add(request)
        answers.append(tokens(engine, step))
        engine.close()
    assert answers[0] == answers[1]
    assert len(answers[0]) == 3 * 15


def test_what_a_decoder_says_of_itself_is_said_of_the_watched_one() -> None:
    class Busy(PlainDecoder):
        has_threads = True

    gpt = small()
    cache = KVCache(gpt.config, 1, device=torch.device("cpu"), dtype=torch.float32)
    assert Watch(gpt, Busy).make_decoder(gpt, cache).has_threads
    assert not Watch(gpt, PlainDecoder).make_decoder(gpt, cache).has_threads


def test_a_prompt_that_torch_computes_is_watched_beside_native_decoding(
    library: ctypes.CDLL,
) -> None:
    def make(gpt: GPT, cache: KVCache) -> NativeDecoder:
        return NativeDecoder(library, gpt, cache, threads=2, prefills=False)

    left = []
    for _ in range(5):  # a pause of the machine may fall between two stages
        prefill, step = profile_engine(small(), make, workload(batches=(3,)))
        assert set(seconds(prefill)) == OF_A_STEP | {"cache_writes"}
        assert set(seconds(step)) == OF_A_STEP
        left.append(max(abs(p.remainder) - 0.05 * p.seconds for p in (prefill, step)))
    assert min(left) < 20e-6


def test_nothing_is_left_on_the_model(decoder: DecoderMaker) -> None:
    gpt = small()
    before = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in gpt.modules()]
    profile_engine(gpt, decoder, workload(batches=(1,)))
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in gpt.modules()] == before


def test_every_other_step_is_watched(decoder: DecoderMaker) -> None:
    gpt = small()
    watch = Watch(gpt, decoder)
    engine = Engine(gpt, EngineConfig(slots=1), make_decoder=watch.make_decoder)
    steps = run_watched(engine, watch, asked(1))
    engine.close()
    assert [step.stages is not None for step in steps] == [True, False] * 7 + [True]
    assert [step.prefilled for step in steps] == [20] + [0] * 14
    assert [step.live_positions for step in steps] == [20, *range(21, 35)]
    for step in steps[2::2]:
        assert step.stages is not None
        assert 0 < sum(step.stages.values()) < step.seconds + 1e-3


# What is computed from steps


def watched_step(length: float, **stages: float) -> WatchedStep:
    return WatchedStep(length, 0, 1, 10, stages)  # type: ignore[arg-type]  # names of stages


def test_the_middle_half_counts() -> None:
    steps = [watched_step(length) for length in (9.0, 1.0, 5.0, 4.0, 6.0, 5.5, 0.5, 100.0)]
    assert sorted(step.seconds for step in middle_half(steps)) == [4.0, 5.0, 5.5, 6.0]
    assert len(middle_half(steps[:1])) == 1
    assert len(middle_half(steps[:3])) == 3


def test_a_profile_by_hand() -> None:
    steps = [
        watched_step(10.0, scheduling=1.0, head=6.0, events=2.0),
        watched_step(12.0, scheduling=1.0, head=8.0, events=2.0),
        WatchedStep(10.0, 0, 1, 10, None),
    ]
    head = Work(100.0, 50.0)
    profile = summarise(steps, lambda live: {"head": head}, batch=1, prompt_tokens=None)
    assert seconds(profile) == {"scheduling": 1.0, "head": 7.0, "events": 2.0}
    assert profile.stages[1].work == head
    assert (profile.seconds, profile.remainder, profile.overhead) == (11.0, 1.0, 3.0)
    assert profile.watching == pytest.approx(0.1)
    assert profile.steps == 2


def test_the_steps_of_a_prompt_are_one() -> None:
    profile = summed([watched_step(1.0, head=0.5), watched_step(2.0, head=1.0, sampling=0.25)])
    assert (profile.seconds, profile.stages) == (3.0, {"head": 1.5, "sampling": 0.25})
    assert summed([WatchedStep(1.0, 32, 0, 40, None)]).stages is None


def test_a_timeline_by_a_clock_that_is_moved_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 6.0, 8.0, 12.0, 13.0])
    monkeypatch.setattr("logitd.model.benchmark.timeline.time.perf_counter", lambda: next(times))
    timeline = Timeline()
    timeline.mark("head")  # nobody looks on: not even at the clock
    timeline.begin()
    timeline.mark("scheduling")
    # Behind this mark to ask takes 2 seconds, which are nobody's.
    timeline.mark("tensors", lambda: {"qkv": 2.0, "head": 1.5, "sampling": 0.0})
    timeline.mark("scheduling")
    assert timeline.end("events") == {
        "scheduling": 5.0, "qkv": 2.0, "head": 1.5, "tensors": 1.5, "events": 1.0,
    }  # fmt: skip
    assert not timeline.running
