"""The engine's answers match `inference/reference.py`, on every decoder and in any mix of
requests."""

import copy
import dataclasses
import random
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from logitd.model.inference.engine.events import FinishReason, OutputsChunk
from logitd.model.inference.engine.requests import (
    GenerationRequest,
    Logits,
    OutputsRequest,
    Request,
    ScoreRequest,
)
from logitd.model.inference.engine.runner import DecoderMaker
from logitd.model.inference.kernels.cpu.decoder import NativeDecoder
from logitd.model.inference.kernels.cpu.library import KernelsUnavailable, load_library
from logitd.model.inference.kernels.eager.decoder import PlainDecoder
from logitd.model.transformer.gpt import GPT
from tests.model.covering import values
from tests.model.factories import FAMILIES
from tests.model.inference.engine.harness import (
    Driven,
    Outcome,
    assert_is_reference,
    constraint_is_complete,
    generation,
    outputs_request,
    random_params,
    random_prompt,
    run,
    score_request,
    small_gpt,
)
from tests.model.inference.kernels.graphs import graph_decoder


def logits_of(gpt: GPT, tokens: list[int]) -> Tensor:
    """Logits (T, V) of a plain forward pass."""
    with torch.inference_mode():
        return gpt(torch.tensor([tokens])).logits[0]


def check_generation(gpt: GPT, request: GenerationRequest, index: int, outcome: Outcome) -> None:
    """Check tokens, logprobs, finish reason and counts of one sequence, finished or aborted."""
    prompt, sampling, end = list(request.token_ids), request.params, outcome.ended
    tokens = outcome.token_ids
    if end.reason is FinishReason.ABORT:  # tokens generated until then
        if tokens:
            cut = dataclasses.replace(sampling, max_tokens=len(tokens), min_tokens=0)
            if not sampling.min_tokens:
                assert_is_reference(gpt, prompt, cut, index, tokens)
    else:
        assert_is_reference(gpt, prompt, sampling, index, tokens)
        stopped = bool(tokens) and tokens[-1] in sampling.stop_token_ids
        whole = constraint_is_complete(sampling, tokens)
        assert end.reason is (FinishReason.STOP if stopped or whole else FinishReason.LENGTH)
        assert end.stop_token_id == (tokens[-1] if stopped else None)
        assert stopped or whole or len(tokens) == sampling.max_tokens
        assert not set(tokens[:-1]) & sampling.stop_token_ids
    assert (end.prompt_tokens, end.completion_tokens) == (len(prompt), len(tokens))
    assert end.error is None
    logprobs = logits_of(gpt, prompt + tokens).log_softmax(dim=-1)
    for i, event in enumerate(outcome.tokens):
        assert (event.chosen is not None) == (sampling.logprobs is not None)
        assert len(event.top) <= (sampling.logprobs or 0)
        if sampling.logprobs_stage == "raw":
            row = logprobs[len(prompt) + i - 1]
            for token in (*((event.chosen,) if event.chosen else ()), *event.top):
                assert token.logprob == pytest.approx(float(row[token.token_id]), abs=2e-3)


def check_rows(gpt: GPT, request: OutputsRequest, outcome: Outcome) -> None:
    expected = logits_of(gpt, list(request.token_ids))[list(request.positions)]
    assert isinstance(request.output, Logits)
    if request.output.columns is not None:
        expected = expected[:, list(request.output.columns)]
    positions = outcome.positions
    if outcome.ended.reason is FinishReason.ABORT:
        assert tuple(positions) == request.positions[: len(positions)]
    else:
        assert outcome.ended.reason is FinishReason.STOP
        assert tuple(positions) == request.positions
    assert outcome.ended.completion_tokens == 0
    if positions:
        rows = torch.cat([torch.from_numpy(event.rows) for event in outcome.rows])
        assert rows.dtype == torch.float32
        assert_close(rows, expected[: len(positions)], atol=2e-3, rtol=1e-3)


def check_score(gpt: GPT, request: ScoreRequest, index: int, outcome: Outcome) -> None:
    continuation = request.continuations[index] if request.continuations else ()
    text = [*request.token_ids, *continuation]
    start = len(request.token_ids) if continuation else 0
    assert outcome.prompt_start == start
    assert [token.token_id for token in outcome.prompt] == text[start:]
    logprobs = logits_of(gpt, text).double().log_softmax(dim=-1)
    for position, token in enumerate(outcome.prompt, start=start):
        assert (token.chosen is None) == (position == 0)
        assert token.chosen is None or token.chosen.token_id == token.token_id
        for one in (*((token.chosen,) if token.chosen else ()), *token.top):
            expected = logprobs[position - 1, one.token_id].item()
            assert one.logprob == pytest.approx(expected, abs=2e-3)


def random_request(rng: random.Random, name: str, gpt: GPT, shared: list[int]) -> Request:
    """A random request that fits the model's context. Half of the prompts start with the beginning
    of `shared`."""
    context, vocab_size = gpt.config.context_length, gpt.config.vocab_size
    length = rng.randint(1, context - 1)
    prompt = random_prompt(rng, length, vocab_size)
    if rng.random() < 0.5:
        common = rng.randint(0, length)
        prompt[:common] = shared[:common]
    if rng.random() < 0.25:
        positions = sorted(rng.sample(range(length), rng.randint(1, length)))
        columns = tuple(random_prompt(rng, 3, vocab_size)) if rng.random() < 0.5 else None
        return outputs_request(name, prompt, positions, output=Logits(columns=columns))
    if rng.random() < 0.1:
        room = context - length
        continuations = [random_prompt(rng, rng.randint(1, room), vocab_size) for _ in range(2)]
        return score_request(name, prompt, *continuations[: rng.randint(0, 2)], top=2)
    sampling = random_params(rng, rng.randint(0, min(20, context - length)), vocab_size)
    return generation(name, prompt, n=rng.choice([1, 1, 1, 2, 3]), sampling=sampling)


GRAPH_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Device on which `kernels/cuda` is tested. On a CPU no CUDA graph is recorded."""


def decoder_on(gpt: GPT, name: str) -> tuple[GPT, DecoderMaker]:
    """The model on the decoder's device, and a function that makes the decoder."""
    if name == "native":
        try:
            library = load_library().functions
        except KernelsUnavailable as reason:
            pytest.skip(str(reason))
        return gpt, partial(NativeDecoder, library, threads=2)
    if name == "torch":
        return gpt, PlainDecoder
    invariant = name == "graph, batch-invariant"
    model = copy.deepcopy(gpt).to(GRAPH_DEVICE)
    return model, partial(graph_decoder, batch_invariant=invariant)


DECODERS = ("torch", "native", "graph", "graph, batch-invariant")


@pytest.mark.parametrize(("family", "decoder", "seed"), values(list(FAMILIES), DECODERS, range(2)))
def test_any_mix_matches_the_reference(family: str, decoder: str, seed: int) -> None:
    """Random prompts, lengths, arrival times, n, samplers and aborts on a random engine."""
    rng = random.Random(f"{family} {decoder} {seed}")
    shape = {**FAMILIES[family], "head_dim": 16} if decoder == "native" else FAMILIES[family]
    gpt = small_gpt(**shape, context_length=rng.choice([50, 100, 128]))
    model, make_decoder = decoder_on(gpt, decoder)
    driven = Driven(
        model,
        make_decoder=make_decoder,
        slots=rng.randint(1, 6),
        prefill_chunk=32 * rng.randint(1, 4),
        prefix_reuse=seed == 0,
        speculate=rng.choice(["none", "ngram"]),
    )
    shared = random_prompt(rng, gpt.config.context_length)
    requests = {name: random_request(rng, name, gpt, shared) for name in "abcdefghij"}
    for request in requests.values():
        driven.add(request)
        for _ in range(rng.choice([0, 0, 1, 5])):
            for event in driven.step().events:
                if isinstance(event, OutputsChunk):
                    driven.engine.grant(event.request_id)
        if rng.random() < 0.15:
            name = rng.choice([*requests])
            driven.abort(name, rng.choice([None, 0, 1]))
    outcomes = driven.drain()
    assert outcomes.keys() == driven.accepted
    for (name, index), outcome in outcomes.items():
        request = requests[name]
        if isinstance(request, GenerationRequest):
            check_generation(gpt, request, index, outcome)
        elif isinstance(request, OutputsRequest):
            check_rows(gpt, request, outcome)
        elif isinstance(request, ScoreRequest) and outcome.ended.reason is FinishReason.STOP:
            check_score(gpt, request, index, outcome)


def test_greedy_text_fills_the_context(gpt: GPT) -> None:
    for length in (1, 31, 32, 33, 127):
        prompt = random_prompt(random.Random(length), length)
        request = generation("a", prompt, max_tokens=128 - length)
        outcome = run(gpt, request)["a", 0]
        assert len(outcome.tokens) == 128 - length
        assert_is_reference(gpt, prompt, request.params, 0, outcome.token_ids)
