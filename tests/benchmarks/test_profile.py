"""Profile: every part of a native step belongs to a stage, and profiling changes no token."""

import ctypes
from typing import Any

import pytest

from benchmarks.profile import (
    OUTSIDE,
    STAGES,
    Watch,
    profile_engine,
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
    """The stages may add up to more time than the step, because their measurement starts before
    that of the step and ends after it. A step takes microseconds, and a pause of the machine may be
    longer than that, so there are five attempts. If a stage is missing or counted twice, all five
    fail."""
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


def test_decoder_in_plain_torch_is_refused() -> None:
    with pytest.raises(BenchmarkError, match="native"):
        profile_engine(PlainDecoder, small("gpt2"), ASKED)
