"""The engine's logit lens, compared with its definition in float64 for every family."""

import copy
import ctypes
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from logitd.model.inference.engine.cost import output_elements, position_elements
from logitd.model.inference.engine.events import FinishReason
from logitd.model.inference.engine.requests import HiddenStates, Lens, OutputsRequest
from logitd.model.inference.engine.validation import check_request
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.interventions import Intervention
from logitd.model.inference.kernels.cpu.decoder import NativeDecoder
from logitd.model.inference.options import Quantization
from logitd.model.inference.sampling.lens import LensDigest, lens_width
from logitd.model.transformer.gpt import GPT
from tests.model.covering import few_families
from tests.model.factories import FAMILIES, tiny_config, tiny_gpt
from tests.model.inference.engine.harness import (
    Driven,
    Outcome,
    generation,
    outputs_request,
    random_prompt,
    run,
    score_request,
)
from tests.model.plain_stages import Change, plain_stages

LENGTH = 75
PROMPT = random_prompt(random.Random(0), LENGTH, 257)
LAYERS = (0, 1, 2, 3)
EVERYTHING = Lens(layers=LAYERS, top_k=6, token_ids=(0, 256, 40, 40))


@pytest.fixture(scope="module", params=FAMILIES)
def gpt(request: pytest.FixtureRequest) -> GPT:
    return tiny_gpt(tiny_config(**FAMILIES[request.param]))


def ask(
    lens: Lens = EVERYTHING,
    positions: Sequence[int] = range(LENGTH),
    *,
    request_id: str = "a",
    prompt: Sequence[int] = PROMPT,
    interventions: tuple[Intervention, ...] = (),
) -> OutputsRequest:
    return outputs_request(request_id, prompt, positions, output=lens, interventions=interventions)


def rows_of(outcome: Outcome) -> Any:
    return outcome.values.numpy()


@dataclass(frozen=True)
class Values:
    """The numbers of a lens, in arrays of shape (P, layers, ...)."""

    ids: Any
    logprobs: Any
    named: Any
    ranks: Any
    entropy: Any
    divergence: Any


def split(rows: Any, lens: Lens) -> Values:
    """Split the rows (P, layers, width) of a lens into its values."""
    k, n = lens.top_k, len(lens.token_ids)
    parts = np.split(rows, [k, 2 * k, 2 * k + n, 2 * (k + n)], axis=-1)
    ids, logprobs, named, ranks, figures = parts
    assert figures.shape[-1] == 2
    return Values(
        ids.astype(int), logprobs, named, ranks.astype(int), figures[..., 0], figures[..., 1]
    )


def lens_of(gpt: GPT, request: OutputsRequest, **config: Any) -> Values:
    assert isinstance(request.output, Lens)
    return split(rows_of(run(gpt, request, **config)[request.request_id, 0]), request.output)


def same_bits(one: Values, other: Values, positions: Any = slice(None)) -> bool:
    """True if `other` equals `one` at the given positions of `one`, bit for bit."""
    return all(
        np.array_equal(getattr(one, field.name)[positions], getattr(other, field.name))
        for field in fields(Values)
    )


def oracle_logprobs(
    gpt: GPT, layers: Sequence[int], change: Change = lambda name, value: value
) -> Tensor:
    """Logprobs (T, layers, V) by the definition, for a model in float64."""
    config = gpt.config
    stages = plain_stages(gpt, PROMPT, change)
    weight, bias = gpt.head_parameters()
    rows = []
    for layer in layers:
        if layer == config.n_layer:
            logits = stages["logits"]
        else:
            stream = stages[f"blocks.{layer - 1}.output" if layer else "embedding"]
            middle = config.n_layer // 2
            if config.backout and layer > middle + 1:
                stream = stream - gpt.backout_scale * stages[f"blocks.{middle}.output"]
            logits = final_norm(gpt, stream) @ weight.T[:, : config.vocab_size]
            logits = logits if bias is None else logits + bias[: config.vocab_size]
            if (cap := config.logit_softcap) is not None:
                logits = cap * torch.tanh(logits / cap)
        rows.append(logits.log_softmax(dim=-1))
    return torch.stack(rows, dim=1).detach()


def final_norm(gpt: GPT, x: Tensor) -> Tensor:
    """Final norm by its definition."""
    config, norm = gpt.config, gpt.final_norm
    if not config.final_norm:
        return x
    centered = config.norm == "layernorm"
    if centered:
        x = x - x.mean(dim=-1, keepdim=True)
    assert isinstance(norm.weight, Tensor)
    x = x / (x.square().mean(dim=-1, keepdim=True) + config.norm_eps).sqrt() * norm.weight
    bias = getattr(norm, "bias", None)
    return x if bias is None else x + bias


def check(values: Values, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Compare a lens with logprobs (P, layers, V)."""
    close = partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    probs = expected.exp()
    own = expected[:, -1:]
    ids = torch.from_numpy(values.ids)
    close(np.exp(values.logprobs), probs.gather(2, ids))
    close(values.logprobs, expected.gather(2, ids))
    likeliest = expected.sort(dim=-1, descending=True).values[..., : ids.shape[2]]
    close(values.logprobs, likeliest)
    named = expected[..., list(EVERYTHING.token_ids)]
    close(values.named, named)
    for column in range(named.shape[-1]):  # up to values that differ only by rounding
        chosen = named[..., column : column + 1]
        assert (values.ranks[..., column] > (expected > chosen + tolerance).sum(-1).numpy()).all()
        most = (expected > chosen - tolerance).sum(-1).numpy()
        assert (values.ranks[..., column] <= np.maximum(1, most)).all()
    close(values.entropy, -(probs * expected).sum(-1))
    close(values.divergence, (own.exp() * (own - expected)).sum(-1))


def test_lens_of_every_layer_matches_the_definition(gpt: GPT) -> None:
    exact = copy.deepcopy(gpt).double()
    check(lens_of(exact, ask()), oracle_logprobs(exact, LAYERS))
    check(lens_of(gpt, ask(), prefill_chunk=32), oracle_logprobs(exact, LAYERS), 2e-3)


def test_lens_includes_the_subtraction_of_the_middle_block() -> None:
    exact = tiny_gpt(tiny_config(**FAMILIES["nanochat"], n_layer=5)).double()
    lens = replace(EVERYTHING, layers=(0, 2, 3, 4, 5))
    check(lens_of(exact, ask(lens)), oracle_logprobs(exact, lens.layers))
    unchanged = (Intervention(stage="embedding", operation="scale", factor=1.0),)
    tapped = ask(lens, interventions=unchanged)
    check(lens_of(exact, tapped), oracle_logprobs(exact, lens.layers))


@few_families
def test_lens_of_the_last_layer_has_the_bits_of_the_logits(gpt: GPT) -> None:
    """The lens lists the logprob of every id. It is compared with the logits of a separate
    request."""
    every = Lens(layers=(3,), top_k=257, token_ids=tuple(range(257)))
    values = lens_of(gpt, ask(every))
    logits = run(gpt, outputs_request("a", PROMPT))["a", 0].values
    again = LensDigest(logits, 257, range(257)).numbers(logits)
    assert same_bits(split(again.numpy()[:, None], every), values)
    order = np.argsort(-logits.numpy(), axis=-1, kind="stable")
    assert (values.ids[:, 0] == order).all()
    exact = logits.double().log_softmax(dim=-1).float().numpy()
    np.testing.assert_allclose(values.named[:, 0], exact, rtol=3e-7)
    assert (values.divergence == 0).all()


@few_families
def test_lens_has_the_same_bits_in_pieces_among_others_and_copied(
    gpt: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = lens_of(gpt, ask())
    driven = Driven(gpt, slots=8, prefill_chunk=64)
    driven.add(generation("g", PROMPT[:50], max_tokens=20, seed=1, temperature=0.8))
    driven.add(ask())
    driven.add(outputs_request("l", PROMPT[:40]))
    driven.add(ask(request_id="b", prompt=PROMPT[3:], positions=range(5, 60)))
    driven.drain()
    assert same_bits(alone, split(rows_of(driven.outcomes["a", 0]), EVERYTHING))
    driven.add(ask(request_id="c", positions=range(64, LENGTH)))
    copied = driven.drain()["c", 0]
    assert copied.ended.cached_tokens == 64
    assert same_bits(alone, split(rows_of(copied), EVERYTHING), slice(64, None))
    monkeypatch.setattr("logitd.model.inference.engine.scheduler.STEP_ELEMENTS", 1)
    pieces = run(gpt, ask())["a", 0]
    assert [len(event.positions) for event in pieces.rows] == [32, 32, 11]
    assert same_bits(alone, split(rows_of(pieces), EVERYTHING))


# The token that follows

FOLLOWING = replace(EVERYTHING, following=True)


def split_following(outcome: Outcome) -> Values:
    return split(rows_of(outcome), replace(FOLLOWING, token_ids=(*FOLLOWING.token_ids, 0)))


@few_families
def test_following_token_has_the_bits_of_naming_and_scoring_it(gpt: GPT) -> None:
    """In all layers but the last, the logprobs of the following token have the same bits as if its
    id were requested. In the last layer, they have the bits that a request for scores returns."""
    positions = range(3, LENGTH - 1)
    every = Lens(layers=LAYERS, top_k=6, token_ids=tuple(range(257)))
    named = lens_of(gpt, ask(every, positions))
    request = ask(FOLLOWING, positions)
    values = split_following(run(gpt, request)["a", 0])
    following = np.array(PROMPT[4:])[:, None, None]  # (P, 1, 1)
    logprobs = np.take_along_axis(named.named, following, axis=2)[..., 0]
    assert np.array_equal(values.named[:, :-1, -1], logprobs[:, :-1])
    np.testing.assert_allclose(values.named[:, -1, -1], logprobs[:, -1], rtol=3e-7)
    ranks = np.take_along_axis(named.ranks, following, axis=2)[..., 0]
    assert np.array_equal(values.ranks[..., -1], ranks)
    scored = run(gpt, score_request("s", PROMPT[:4], PROMPT[4:]))["s", 0].prompt
    of_score = [np.float32(token.chosen.logprob) for token in scored if token.chosen is not None]
    assert np.array_equal(values.named[:, -1, -1], of_score)
    # Everything else is the same as without it.
    plain = lens_of(gpt, ask(positions=positions))
    assert np.array_equal(values.named[..., :-1], plain.named)
    assert np.array_equal(values.ranks[..., :-1], plain.ranks)
    for name in ("ids", "logprobs", "entropy", "divergence"):
        assert np.array_equal(getattr(values, name), getattr(plain, name)), name


# Interventions


@few_families
def test_lens_reads_changed_streams(gpt: GPT) -> None:
    exact = copy.deepcopy(gpt).double()
    change = Intervention(stage="blocks.1.mlp.out", operation="scale", factor=-2.0)

    def by_hand(name: str, value: Tensor) -> Tensor:
        return -2 * value if name == change.stage else value

    request = ask(interventions=(change,))
    check(lens_of(exact, request), oracle_logprobs(exact, LAYERS, by_hand))
    # Values before the change stay the same, except for their distance from the end.
    plain, changed = lens_of(gpt, ask()), lens_of(gpt, request)
    assert np.array_equal(plain.logprobs[:, :2], changed.logprobs[:, :2])
    assert not np.allclose(plain.divergence[:, 0], changed.divergence[:, 0])
    assert (changed.divergence[:, -1] == 0).all()


def test_change_of_the_final_norm_affects_the_last_layer_only() -> None:
    gpt = tiny_gpt(tiny_config())
    zero = Intervention(stage="final_norm", operation="zero")
    plain, changed = lens_of(gpt, ask()), lens_of(gpt, ask(interventions=(zero,)))
    assert np.array_equal(plain.entropy[:, :3], changed.entropy[:, :3])
    np.testing.assert_allclose(changed.entropy[:, 3], np.log(257), rtol=1e-6)
    assert (changed.ids[:, 3] == np.arange(6)).all(), "ties in the order of ids"
    assert (changed.ranks[:, 3] == 1).all()


@few_families
def test_lens_that_is_not_finite_ends_its_own_request_alone(gpt: GPT) -> None:
    """No comparison with NaN is true, so the search for the likeliest ids once failed, and all
    requests of the step failed with it."""
    broken = Intervention(
        stage="final_norm" if gpt.config.final_norm else "blocks.2.output",
        operation="set",
        values=np.full((1, gpt.config.d_model), np.inf, dtype=np.float32),
    )
    outcomes = run(gpt, ask(request_id="broken", interventions=(broken,)), ask(request_id="b"))
    ended = outcomes["broken", 0].ended
    assert ended.reason is FinishReason.ERROR
    assert ended.param == "interventions"
    assert ended.error is not None
    assert "not finite" in ended.error
    assert np.array_equal(rows_of(outcomes["b", 0]), rows_of(run(gpt, ask())["a", 0]))


# The native decoder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_native_decoder_matches_the_lens(
    library: ctypes.CDLL, family: str, dtype: torch.dtype, quantize: Quantization
) -> None:
    """In every dtype, the native decoder keeps the residual streams in float32. It does not
    quantize the weights of the norms."""
    native = partial(NativeDecoder, library, threads=2, quantize=quantize)
    gpt = tiny_gpt(tiny_config(**{**FAMILIES[family], "head_dim": 16})).to(dtype)
    every = Lens(layers=LAYERS, top_k=257, token_ids=())
    values = lens_of(
        gpt, ask(every), make_decoder=native
    )  # this also replaces the weights by the quantized ones
    exact = copy.deepcopy(gpt).double()
    states = outputs_request("a", PROMPT, output=HiddenStates(layers=LAYERS))
    streams = run(gpt, states, make_decoder=native)["a", 0].values.double()
    expected = exact.logits(exact.final_norm(streams)).log_softmax(dim=-1).detach()
    entropy = -(expected.exp() * expected).sum(-1)
    tolerance = 0.2 if quantize != "none" else {torch.float32: 1e-4, torch.bfloat16: 0.05}[dtype]
    np.testing.assert_allclose(values.entropy, entropy, atol=tolerance)
    logits = rows_of(run(gpt, outputs_request("a", PROMPT), make_decoder=native)["a", 0])
    order = np.argsort(-logits, axis=-1, kind="stable")
    assert (values.ids[:, -1] == order).all()
    few = lens_of(gpt, ask(every, (3, 40)), make_decoder=native, prefill_chunk=32)
    assert same_bits(values, few, [3, 40])


# Cost and memory


@pytest.mark.parametrize(
    "lens",
    [
        Lens(layers=(0, 3), top_k=2, token_ids=(1, 2, 3)),
        Lens(layers=(1, 2), top_k=1),
        Lens(layers=(3,), top_k=257),
        Lens(layers=(2, 3), top_k=1, token_ids=(5,), following=True),
    ],
)
def test_cost_counts_logits_and_figures(lens: Lens) -> None:
    gpt = tiny_gpt(tiny_config())
    request = ask(lens, positions=(3, 9))
    rows = rows_of(run(gpt, request)["a", 0])
    assert rows.shape == (2, len(lens.layers), lens_width(lens.top_k, lens.named))
    computed = len({*lens.layers, 3}) * 257
    assert position_elements(request, gpt.config) == computed + rows[0].size
    assert output_elements(request, gpt.config) == 2 * position_elements(request, gpt.config)


# Refusals


@pytest.mark.parametrize(("size", "fits"), [(2**24, True), (2**24 + 1, False)])
def test_vocabulary_beyond_float32_is_refused(size: int, fits: bool) -> None:
    config = tiny_config(vocab_size=size)
    if fits:
        check_request(ask(), config)
        return
    with pytest.raises(InvalidRequest, match="16777217"):
        check_request(ask(), config)
