"""Batch invariance: a request's tokens and logprobs have the same bits in any batch.

Each request of a pool is computed alone on a new engine. Then random mixes of them run together, in
random order, arriving at random steps, on engines of other sizes, with a cold or a warm prefix
cache. Every outcome must be the same as when the request runs alone.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logitd.model.inference.constraints.compiler import Constraint
from logitd.model.inference.engine.events import OutputsChunk
from logitd.model.inference.engine.requests import (
    AttentionWeights,
    AttributionRequest,
    GenerationRequest,
    HiddenStates,
    OutputsRequest,
    Request,
    ScoreRequest,
)
from logitd.model.inference.engine.runner import DecoderMaker
from logitd.model.inference.engine.scheduler import STEP_ELEMENTS
from logitd.model.inference.interventions import Intervention
from logitd.model.inference.kernels.cpu.decoder import NativeDecoder
from logitd.model.inference.kernels.cpu.library import KernelsUnavailable, load_library
from logitd.model.inference.kernels.eager import decoder as plain
from logitd.model.inference.kernels.eager.decoder import PlainDecoder
from logitd.model.inference.kernels.eager.row_groups import RowGroups
from logitd.model.inference.options import DecodeSteps, KVCacheDType, TargetGap
from logitd.model.transformer.config import BLOCK
from logitd.model.transformer.gpt import GPT
from tests.model.covering import values
from tests.model.factories import FAMILIES, tiny_config, tiny_gpt
from tests.model.inference.engine.harness import (
    Driven,
    JumpingClock,
    Steps,
    generation,
    outputs_request,
    random_params,
    random_prompt,
    score_request,
    skip_unless_rows_depend_on_their_number,
)
from tests.model.inference.engine.test_against_reference import GRAPH_DEVICE
from tests.model.inference.kernels.graphs import graph_decoder
from tests.profiles import examples

SHAPES: dict[str, dict[str, Any]] = {
    # In bfloat16 torch chooses the kernel of a very small product (rows * width * width up to 4096)
    # by the number of rows. No model that is served is as narrow, but `tiny_config` is.
    **{name: {**overrides, "d_model": 48} for name, overrides in FAMILIES.items()},
    # No size is a multiple of a vector, and the context ends within a block.
    "odd": {"n_head": 3, "d_model": 54, "d_ff": 111, "context_length": 101, "vocab_size": 83},
    "odd-modern": {**FAMILIES["modern"], "n_head": 6, "head_dim": 14, "d_model": 54, "d_ff": 111},
    "odd-llama": {**FAMILIES["llama"], "n_head": 6, "head_dim": 10, "d_model": 51, "d_ff": 111},
}
DTYPES = [torch.float32, torch.bfloat16]
NUMBERS: list[HiddenStates | AttentionWeights] = [
    HiddenStates(layers=(0, 1)),
    AttentionWeights(layers=(0,), heads=(0, 1)),
]

CHANGES = (
    Intervention(stage="blocks.0.attention.probs", operation="scale", factor=0.5),
    Intervention(stage="blocks.0.mlp.out", operation="zero", positions="generated"),
)

AS_THEY_ARE = RowGroups(1, 33)
POOL, MIXES = 10, 1
"""Number of requests in the pool, and number of engines that each compute a random mix of them.
These are enough to detect missing padding rows."""


def shape(name: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> GPT:
    return tiny_gpt(tiny_config(**({"n_layer": 2} | SHAPES[name] | overrides))).to(dtype)


def pool_of_requests(rng: random.Random, gpt: GPT, count: int, max_tokens: int) -> list[Request]:
    """Requests of every kind. Most prompts begin with a part of the same text."""
    vocab_size, context = gpt.config.vocab_size, gpt.config.context_length
    shared = random_prompt(rng, context, vocab_size)
    pool: list[Request] = []
    for i in range(count):
        length = rng.choice([rng.randint(1, 12), rng.randint(1, context - max_tokens)])
        common = rng.randint(0, length)
        prompt = shared[:common] + random_prompt(rng, length - common, vocab_size)
        if i % 10 == 8:
            room = context - length
            continuations = [random_prompt(rng, rng.randint(1, room), vocab_size) for _ in range(3)]
            pool.append(score_request(str(i), prompt, *continuations[: rng.randint(0, 3)], top=2))
        elif i % 10 == 3:
            wanted = rng.choice(NUMBERS)
            positions = range(rng.randrange(length), length)
            pool.append(outputs_request(str(i), prompt, positions, output=wanted))
        elif i % 5 == 4:
            pool.append(outputs_request(str(i), prompt, range(rng.randrange(length), length)))
        else:
            sampling = random_params(rng, rng.randint(0, max_tokens), vocab_size)
            n = rng.choice([1, 1, 1, 3])
            pool.append(generation(str(i), prompt, n=n, sampling=sampling))
        request = pool[-1]
        if i % 7 == 2 and not isinstance(request, AttributionRequest):
            pool[-1] = replace(request, interventions=CHANGES)
    return pool


def alone(
    gpt: GPT, pool: list[Request], make_decoder: DecoderMaker, **config: Any
) -> dict[tuple[str, int], object]:
    """Outcomes of each request on a new engine with one slot."""
    found = {}
    for request in pool:
        driven = Driven(
            gpt, make_decoder=make_decoder, slots=1, prefill_chunk=256, prefix_reuse=False, **config
        )
        driven.add(request)
        found.update({key: outcome.computed for key, outcome in driven.drain().items()})
    return found


def together(
    rng: random.Random, gpt: GPT, pool: list[Request], make_decoder: DecoderMaker, **config: Any
) -> dict[tuple[str, int], object]:
    """A random mix of the pool on a random engine."""
    driven = Driven(
        gpt,
        make_decoder=make_decoder,
        slots=rng.choice([2, 3, 5, 8, 13, 32]),
        prefill_chunk=32 * rng.choice([1, 2, 3, 8]),
        prefix_reuse=rng.random() < 0.8,
        speculate=rng.choice(["none", "ngram"]),
        **config,
    )
    driven.engine._scheduler.step_elements = rng.choice([1, 2**15, STEP_ELEMENTS])
    mix = rng.sample(pool, rng.randint(2, min(32, len(pool))))
    pause = rng.choice([0.0, 0.3, 0.7])
    for request in mix:
        driven.add(request)
        while rng.random() < pause and driven.engine.has_work():
            for event in driven.step().events:
                if isinstance(event, OutputsChunk):
                    driven.engine.grant(event.request_id)
    return {key: outcome.computed for key, outcome in driven.drain().items()}


def differences(
    gpt: GPT,
    *,
    seed: object,
    pool_size: int,
    mixes: int,
    max_tokens: int = 8,
    make_decoder: DecoderMaker = PlainDecoder,
    **config: Any,
) -> int:
    """Number of sequences whose outcome in a batch differs from their outcome alone."""
    rng = random.Random(str(seed))
    pool = pool_of_requests(rng, gpt, pool_size, max_tokens)
    expected = alone(gpt, pool, make_decoder, **config)
    found = [together(rng, gpt, pool, make_decoder, **config) for _ in range(mixes)]
    return sum(outcome != expected[key] for mix in found for key, outcome in mix.items())


@pytest.mark.parametrize(
    ("name", "dtype", "kept"), values(list(SHAPES), DTYPES, get_args(KVCacheDType))
)
def test_batch_changes_no_bit(name: str, dtype: torch.dtype, kept: KVCacheDType) -> None:
    gpt = shape(name, dtype)
    found = differences(gpt, seed=name, pool_size=POOL, mixes=MIXES, kv_cache_dtype=kept)
    assert found == 0


@pytest.fixture(
    scope="module", params=["none", "int8", pytest.param("int4", marks=pytest.mark.slow)]
)
def native(request: pytest.FixtureRequest) -> DecoderMaker:
    try:
        library = load_library().functions
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    return partial(NativeDecoder, library, threads=2, quantize=request.param)


@pytest.mark.parametrize(
    ("name", "dtype", "native"),
    values(list(FAMILIES), DTYPES, ("none", "int8", "int4")),
    indirect=["native"],
)
def test_batch_changes_no_bit_of_native_code(
    name: str, dtype: torch.dtype, native: DecoderMaker
) -> None:
    """With native decoders, the prefix cache shares blocks of generated tokens as well."""
    gpt = shape(name, dtype, head_dim=16)
    assert differences(gpt, seed=name, pool_size=POOL, mixes=MIXES, make_decoder=native) == 0


@pytest.mark.parametrize("name", ["modern", "scaled"])
def test_batch_changes_no_bit_of_batch_invariant_graphs(name: str) -> None:
    gpt = shape(name).to(GRAPH_DEVICE)
    graphs = partial(graph_decoder, batch_invariant=True)
    assert differences(gpt, seed=name, pool_size=POOL, mixes=MIXES, make_decoder=graphs) == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_conversation_copies_its_own_answers(name: str, native: DecoderMaker) -> None:
    """The cached blocks of an answer are copied like the blocks of a prompt. The next answer equals
    the answer of a new engine."""
    gpt, rng = shape(name, head_dim=16), random.Random(name)
    driven = Driven(gpt, make_decoder=native, slots=2, prefill_chunk=64, speculate="ngram")
    text: list[int] = []
    for turn in range(3):
        text = [*text, *random_prompt(rng, 5, 257)]
        request = generation(str(turn), text, max_tokens=35, seed=turn, logprobs=2)
        driven.add(request)
        outcome = driven.drain()[str(turn), 0]
        # The last token of an answer was sampled and not computed.
        computed = len(text) - 5 - 1
        assert outcome.ended.cached_tokens == max(0, computed // BLOCK * BLOCK)
        fresh = Driven(gpt, make_decoder=native, slots=1)
        fresh.add(request)
        assert outcome.computed == fresh.drain()[str(turn), 0].computed
        text += outcome.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_batch_changes_no_bit_at_a_real_width(name: str, dtype: torch.dtype) -> None:
    gpt = shape(name, dtype, d_model=768, n_head=12, n_layer=1, context_length=512)
    assert differences(gpt, seed=name, pool_size=8, mixes=2, max_tokens=4) == 0


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)],
    ids=["float32", "bfloat16"],
)
def test_batch_changes_no_bit_with_two_threads(dtype: torch.dtype) -> None:
    """The model is wide enough for torch to divide products and activations between the threads."""
    gpt = shape("modern", dtype, d_model=160, d_ff=1000, n_layer=1)
    assert differences(gpt, seed=dtype, pool_size=6, mixes=1, max_tokens=3) == 0


@settings(max_examples=examples(20, fast=2))
@given(
    seed=st.integers(0, 2**32),
    target=st.one_of(
        st.floats(1e-4, 100.0), st.builds(DecodeSteps, st.floats(1.01, 1000.0)), st.none()
    ),
    chunk=st.integers(1, 8).map(lambda blocks: blocks * BLOCK),
)
def test_step_times_change_no_bit(
    native: DecoderMaker, seed: int, target: TargetGap | None, chunk: int
) -> None:
    """The times of earlier steps decide how many prompt positions a step computes. With a jumping
    clock, this number differs from step to step."""
    gpt, rng = shape("modern", head_dim=16), random.Random(seed)
    pool = pool_of_requests(rng, gpt, 8, max_tokens=24)
    for make_decoder in (PlainDecoder, native):
        driven = Driven(
            gpt,
            JumpingClock(rng),
            make_decoder=make_decoder,
            slots=5,
            prefill_chunk=chunk,
            target_gap=target,
        )
        driven.add(*pool)
        found = {key: outcome.computed for key, outcome in driven.drain().items()}
        assert found == alone(gpt, pool, make_decoder)


# The tests above can fail


def test_unpadded_rows_differ_in_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unless_rows_depend_on_their_number()
    monkeypatch.setattr(plain, "decode_row_groups", lambda gpt: AS_THEY_ARE)
    assert differences(shape("gpt2"), seed="gpt2", pool_size=POOL, mixes=MIXES) > 0


def test_pools_contain_every_kind_of_request() -> None:
    """Check that the mixes contain what they claim to cover."""
    pool = pool_of_requests(random.Random("gpt2"), shape("gpt2"), 60, 8)
    generations = [request for request in pool if isinstance(request, GenerationRequest)]
    assert sum(isinstance(request, OutputsRequest) for request in pool) == 18
    assert sum(isinstance(request, ScoreRequest) for request in pool) == 6
    assert any(request.n > 1 for request in generations)
    for asks in (
        lambda p: p.temperature == 0,
        lambda p: p.temperature > 0 and p.top_p < 1 and p.top_k,
        lambda p: p.min_p > 0,
        lambda p: p.repetition_penalty != 1,
        lambda p: p.allowed_token_ids is not None,
        lambda p: isinstance(p.constraint, Steps),
        lambda p: isinstance(p.constraint, Constraint),
        lambda p: p.logprobs == 3 and p.logprobs_stage == "raw",
        lambda p: p.logprobs == 3 and p.logprobs_stage == "processed",
    ):
        assert any(asks(request.params) for request in generations)
