"""The native decoder compared with the plain decoder, for models of every shape. A row has the same
bits in any batch."""

import ctypes
import math
import random
import statistics
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from benchmarks.profile import Timeline, WatchedDecoder
from logitd.model.inference.kernels.base import AttentionSelection, Decoder, PrefillInput
from logitd.model.inference.kernels.cpu import decoder as cpu_decoder
from logitd.model.inference.kernels.cpu.decoder import PREFILL_ROWS, NativeDecoder
from logitd.model.inference.kernels.cpu.describe import matrices, quantized_bytes
from logitd.model.inference.kernels.eager.contention import ContentionMonitor
from logitd.model.inference.kernels.eager.decoder import PlainDecoder, grouped_logits
from logitd.model.inference.kernels.eager.row_groups import RowGroups
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.options import DRAFTED_ROWS, KVCacheDType, Quantization
from logitd.model.transformer.arena import PAGE, room_for
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.gpt import GPT
from tests.model.covering import values
from tests.model.factories import FAMILIES, random_ids, tiny_config, tiny_gpt
from tests.model.inference.engine.harness import Driven, generation, random_prompt
from tests.model.inference.kernels.cpu.plain_forms import quantized_matrix
from tests.model.shapes import COMBINATIONS, PAIRED, PARTS, shapes
from tests.profiles import examples

SLOTS, STEPS = 5, 40
COMBINED = {"n_layer": 2, "n_kv_head": 2, "head_dim": 16, "d_model": 44, "d_ff": 70}
CPU = torch.device("cpu")
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)


def native_config(family: str, **overrides: Any) -> GPTConfig:
    """A shape that the native decoder covers, with odd widths."""
    return tiny_config(
        **{**FAMILIES[family], "head_dim": 16, "d_model": 44, "d_ff": 70, **overrides}
    )


def quantization(kind: str) -> Quantization:
    """The quantization that `kind` names; "none" if it names no quantization."""
    return next((name for name in QUANTIZATIONS if name == kind), "none")


def new_cache(gpt: GPT, slots: int = SLOTS, kept: KVCacheDType = "auto") -> KVCache:
    dtype = gpt.token_embedding.weight.dtype
    return KVCache(gpt.config, slots, device=CPU, dtype=dtype, kept=kept)


def kept_in(kind: str) -> KVCacheDType:
    """The dtype in which a decoder of this kind stores keys and values."""
    return "int8" if kind.endswith("cells") else "auto"


def same_cells(one: KVCache, slot: int, other: KVCache, there: int, length: int) -> bool:
    """True if the first `length` positions of two slots hold the same bits."""
    pairs = [(one.keys, other.keys), (one.values, other.values)]
    if one.key_scales is not None and one.value_scales is not None:
        assert other.key_scales is not None
        assert other.value_scales is not None
        pairs += [(one.key_scales, other.key_scales), (one.value_scales, other.value_scales)]
    return all(
        torch.equal(ours[:, slot, :, :length], theirs[:, there, :, :length])
        for ours, theirs in pairs
    )


def decoded(decoder: Any, ids: Tensor, slots: list[int]) -> list[Tensor]:
    """Logits (B, V) of each step of `ids` (B, steps)."""
    rows = []
    with torch.inference_mode():
        for position in range(ids.shape[1]):
            places = [position] * len(slots)
            logits = decoder.decode(ids[:, position].tolist(), slots, places)
            rows.append(logits.float().clone())
    return rows


def decoded_at(decoder: Decoder, ids: list[int], slot: int, start: int) -> Tensor:
    """Logits (T, V) of consecutive tokens of a slot, computed one by one."""
    rows = [decoder.decode([token], [slot], [start + i])[0].clone() for i, token in enumerate(ids)]
    return torch.stack(rows)


@pytest.mark.parametrize("name", [*PAIRED, *PARTS])
def test_every_combination_matches_the_twin(library: ctypes.CDLL, name: str) -> None:
    """Compares logits, the residual stream, attention weights, keys and values, for prompts of
    several lengths and for the steps after them. Errors are relative to the standard deviation of
    the expected numbers, because logits are large without a norm before the head."""
    gpt = tiny_gpt(tiny_config(**{**(COMBINATIONS | PARTS)[name], **COMBINED}))
    caches = new_cache(gpt), new_cache(gpt)
    native = NativeDecoder(library, gpt, caches[0], threads=2)
    decoders: tuple[Decoder, Decoder] = native, PlainDecoder(gpt, caches[1])
    for length in (1, 5, 17, 124):
        ids, wanted = random_ids(length).tolist(), AttentionSelection((1, 0), (3, 1), length + 5)
        results = []
        for decoder, cache in zip(decoders, caches, strict=True):
            with torch.inference_mode():
                [prompt] = decoder.prefill([PrefillInput(ids, 1, 0, states=True, weights=wanted)])
                steps = decoded_at(decoder, [7, 8, 9], 1, length)
            cells = [kept[:, 1, :, :length].clone() for kept in (cache.keys, cache.values)]
            assert prompt.states is not None
            assert prompt.weights is not None
            results.append((prompt.hidden, steps, prompt.states, prompt.weights, *cells))
        for found, expected in zip(*results, strict=True):
            assert (found - expected).abs().max() / expected.std() < 1e-3
        [alone] = native.prefill([PrefillInput(ids, 1, 0)])
        assert torch.equal(alone.hidden, results[0][0]), "recording changes no bit"
        assert alone.states is None
        assert alone.weights is None
    native.close()


def test_softcap_limits_logits_and_keeps_nan(library: ctypes.CDLL) -> None:
    """Some logits are near 0 and some are near the limit. Two threads divide the vocabulary, whose
    size is not a multiple of the vector width."""
    config = tiny_config(**COMBINED, vocab_size=9001, tied_head=False)
    gpt = tiny_gpt(config)
    hidden = torch.randn(3, 44, generator=torch.Generator().manual_seed(0))
    hidden *= torch.tensor([[0.001], [1.0], [100.0]])
    native = NativeDecoder(library, gpt, new_cache(gpt), threads=2)
    uncapped = native.head(hidden)
    native.close()
    capped_gpt = GPT(replace(config, logit_softcap=7.0)).eval()
    capped_gpt.load_state_dict(gpt.state_dict())
    capped = NativeDecoder(library, capped_gpt, new_cache(capped_gpt), threads=2)
    expected = 7 * torch.tanh(uncapped.double() / 7)
    assert_close(capped.head(hidden).double(), expected, atol=1e-9, rtol=5e-7)
    assert torch.equal(capped.head(hidden)[1], capped.head(hidden[1:2])[0])
    hidden[0, 0] = torch.nan
    assert capped.head(hidden)[0].isnan().all()
    capped.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_accurate_as_the_twin(library: ctypes.CDLL, family: str) -> None:
    config, ids = native_config(family), random_ids(2, STEPS)
    exact = tiny_gpt(config)(ids).logits
    gpt = tiny_gpt(config).to(torch.bfloat16)
    errors = []
    for decoder in (
        PlainDecoder(gpt, new_cache(gpt)),
        NativeDecoder(library, gpt, new_cache(gpt), threads=1),
    ):
        found = torch.stack(decoded(decoder, ids, [0, 1]), dim=1)
        errors.append((found - exact).std() / exact.std())
        decoder.close()
    plain, native = errors
    assert native < 1.3 * plain + 0.005
    assert native > 1e-4, "computed in bfloat16"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantize", QUANTIZATIONS)
def test_row_has_the_same_bits_in_any_batch(
    library: ctypes.CDLL, dtype: torch.dtype, quantize: Quantization
) -> None:
    """Batches of 1 to 32 rows cover products that stream the rows of the weights, products in
    tiles, and the rows that do not fill a whole tile."""
    gpt = tiny_gpt(native_config("modern", d_model=68, d_ff=132)).to(dtype)
    cache = KVCache(gpt.config, 33, device=CPU, dtype=dtype)
    native = NativeDecoder(library, gpt, cache, threads=2, quantize=quantize)
    ids = random_ids(33, 6)
    rng = random.Random(0)
    for position in range(5):
        native.decode(ids[:, position].tolist(), list(range(33)), [position] * 33)
    together = native.decode(ids[:, 5].tolist(), list(range(33)), [5] * 33).clone()
    for count in (1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12, 13, 16, 21, 32):
        rows = rng.sample(range(33), count)
        found = native.decode([int(ids[row, 5]) for row in rows], rows, [5] * count)
        assert torch.equal(found, together[rows]), count
    native.close()


@pytest.mark.parametrize(
    ("family", "kind"),
    values(
        list(FAMILIES),
        ("plain", "plain cells", "float32", "float32 cells", "bfloat16", "int8", "int4"),
    ),
)
def test_consecutive_rows_have_the_bits_of_single_calls(
    library: ctypes.CDLL, family: str, kind: str
) -> None:
    """Several slots have one to five rows each. The last rows hold wrong tokens, and later steps
    overwrite their keys and values before reading them."""
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    rng, ids = random.Random(family), random_ids(3, 44)
    wrong = (ids + 1) % 257

    def new_decoder() -> Decoder:
        gpt = tiny_gpt(native_config(family, d_model=48, n_layer=2)).to(dtype)
        cache = new_cache(gpt, kept=kept_in(kind))
        if kind.startswith("plain"):
            return PlainDecoder(gpt, cache)
        return NativeDecoder(library, gpt, cache, threads=2, quantize=quantization(kind))

    one_by_one = new_decoder()
    expected = torch.stack(decoded(one_by_one, ids, [4, 0, 2]), dim=1)  # (3, 44, V)
    one_by_one.close()
    decoder, lengths = new_decoder(), [0, 0, 0]
    while min(lengths) < 38:
        rows = []  # sequence, position, True if its token is the text's
        for sequence in rng.sample(range(3), rng.randint(1, 3)):
            start, right, rest = lengths[sequence], rng.randint(1, 3), rng.randint(0, 2)
            if start + right + rest <= 44:
                places = range(start, start + right + rest)
                rows += [(sequence, place, place < start + right) for place in places]
                lengths[sequence] += right
        if not rows:
            continue
        with torch.inference_mode():
            found = decoder.decode(
                [int((ids if right else wrong)[one, place]) for one, place, right in rows],
                [[4, 0, 2][one] for one, _, _ in rows],
                [place for _, place, _ in rows],
            )
        for row, (one, place, right) in zip(found.float(), rows, strict=True):
            assert torch.equal(row, expected[one, place]) == right, (one, place)
    decoder.close()


@pytest.mark.parametrize("times", [400, pytest.param(2000, marks=pytest.mark.slow)])
def test_row_never_runs_ahead_of_the_one_before_it(library: ctypes.CDLL, times: int) -> None:
    """The model has one key head, and there are more threads than cores. If threads divided the
    rows of a slot, a thread could read a key that another thread has not written yet, and use the
    previous text's key instead."""
    gpt = tiny_gpt(native_config("modern", n_kv_head=1, n_head=8, head_dim=64, n_layer=1))
    native = NativeDecoder(library, gpt, new_cache(gpt), threads=5)
    texts = random_ids(2, 8).tolist()
    place = [0] * 8, list(range(8))
    expected = [native.decode(text, *place).clone() for text in texts]
    for _ in range(times):
        for text, logits in zip(texts, expected, strict=True):
            assert torch.equal(native.decode(text, *place), logits)
    native.close()


def prefilled(decoder: Decoder, slot: int, ids: list[int], cuts: list[int]) -> Tensor:
    """The final hidden states (T, d_model) of a prompt computed in chunks that end at `cuts`."""
    ends = [*cuts, len(ids)]
    with torch.inference_mode():
        parts = [
            decoder.prefill([PrefillInput(ids[start:end], slot, start)])[0].hidden
            for start, end in zip([0, *cuts], ends, strict=True)
        ]
    return torch.cat(parts).float()


@pytest.mark.parametrize(("family", "head_dim"), values(list(FAMILIES), (16, 48, 256)))
def test_int8_keys_and_values_match_the_twin(
    library: ctypes.CDLL, family: str, head_dim: int
) -> None:
    """A prompt is followed by single steps. Values that differ by rounding may be stored as
    neighboring integers. In one block this is rare, but sharp attention and further blocks amplify
    it. So the test allows an error of half the effect of int8 itself, and its models with
    several blocks have nearly uniform attention."""

    def outcome(decoder: Decoder) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            [prompt] = decoder.prefill([PrefillInput(ids[:50], 1, 0)])
        return prompt.hidden.clone(), decoded_at(decoder, ids[50:], 1, 50)

    ids = random_ids(60).tolist()
    for n_layer, calmer in ((1, 1.0), (3, 0.2)):
        gpt = tiny_gpt(native_config(family, head_dim=head_dim, n_layer=n_layer))
        for name, parameter in gpt.named_parameters():
            if ".qkv." in name:
                parameter.data.mul_(calmer)
        caches = [new_cache(gpt, kept="int8") for _ in range(2)]
        native = NativeDecoder(library, gpt, caches[0], threads=2)
        found, rounded = outcome(native), outcome(PlainDecoder(gpt, caches[1]))
        native.close()
        for ours, theirs, exact in zip(
            found, rounded, outcome(PlainDecoder(gpt, new_cache(gpt))), strict=True
        ):
            assert (ours - theirs).abs().mean() < 0.5 * (theirs - exact).abs().mean()
        for name in ("keys", "values"):
            ours, theirs = (getattr(cache, name)[0, 1, :, :60].int() for cache in caches)
            assert (ours - theirs).abs().max() <= 1
            assert (ours != theirs).float().mean() < 0.005


@pytest.mark.parametrize(
    "kind", ["float32", "float32 cells", "bfloat16", "bfloat16 cells", "int8", "int4"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_has_the_bits_of_decoding_it(library: ctypes.CDLL, family: str, kind: str) -> None:
    """Chunk sizes vary: some chunks have more rows than a tile holds, or more than attention
    computes at once. Each head fills an odd number of vectors. In narrow dtypes, its last vector is
    only half filled."""
    overrides: dict[str, int] = {"d_model": 520, "d_ff": 530} if family == "modern" else {}
    overrides |= {"n_layer": 2, "head_dim": 48 if family == "llama" else 16}
    gpt = tiny_gpt(native_config(family, **overrides))
    gpt = gpt.to(torch.bfloat16 if kind.startswith("bfloat16") else torch.float32)
    cache, ids = new_cache(gpt, kept=kept_in(kind)), random_ids(1, 101)
    native = NativeDecoder(library, gpt, cache, threads=2, quantize=quantization(kind))
    by_token = torch.stack(decoded(native, ids, [3]), dim=1)[0]  # (101, V)
    text = ids[0].tolist()
    for slot, cuts in enumerate(([], [32], [32, 64, 96])):
        hidden = prefilled(native, slot, text, cuts)
        assert torch.equal(native.head(hidden), by_token), cuts
        assert same_cells(cache, slot, cache, 3, 101), cuts
    native.close()


@pytest.mark.parametrize("kind", ["float32", "float32 cells", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_pass_has_the_bits_of_prompts_and_steps(
    library: ctypes.CDLL, family: str, kind: str
) -> None:
    """One pass computes the end of one prompt, a whole prompt, the first part of another prompt,
    one row of a sequence, and three rows of another sequence, as for drafts."""
    gpt = tiny_gpt(native_config(family, n_layer=2))
    gpt = gpt.to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    caches = [new_cache(gpt, 6, kept_in(kind)) for _ in range(2)]
    apart, native = (
        NativeDecoder(library, gpt, cache, threads=2, quantize=quantization(kind))
        for cache in caches
    )
    texts = [random_ids(100 + length)[:length].tolist() for length in (50, 17, 90, 40, 33)]
    begun = [PrefillInput(texts[0][:32], 0, 0), *(
        PrefillInput(text, slot, 0) for slot, text in ((3, texts[3]), (5, texts[4]))
    )]  # fmt: skip
    for decoder in (apart, native):
        decoder.prefill(begun)
    pieces = [
        PrefillInput(texts[0][32:], 0, 32),
        PrefillInput(texts[1], 1, 0),
        PrefillInput(texts[2], 2, 0),
    ]
    rows = ([7, 9, 2, 4], [3, 5, 5, 5], [40, 33, 34, 35])
    hidden, logits = native.mixed(pieces, [0, 1], rows)
    expected = [prefilled.hidden for prefilled in apart.prefill(pieces)]
    ends = torch.cat([states[-1:] for states in expected[:2]])
    assert torch.equal(logits, torch.cat([apart.head(ends), apart.decode(*rows)]))
    for found, states in zip(hidden, expected, strict=True):
        assert torch.equal(found, states)
    for slot, length in enumerate((50, 17, 90, 41, 0, 36)):
        assert same_cells(caches[1], slot, caches[0], slot, length)
    for decoder in (apart, native):
        decoder.close()


@pytest.mark.parametrize("prefill_chunk", [64, 512])
def test_engine_computes_prompts_and_steps_in_one_pass(
    library: ctypes.CDLL, prefill_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens are the same as with separate passes. With chunks of 512 positions, a step may
    have more rows than fit into one pass; then its prompts and its decoding sequences take separate
    passes."""
    passes: list[int] = []
    mixed = NativeDecoder.mixed

    def counted(decoder: NativeDecoder, pieces: Any, ends: Any, rows: Any) -> Any:
        passes.append(sum(len(piece.token_ids) for piece in pieces))
        return mixed(decoder, pieces, ends, rows)

    gpt = tiny_gpt(native_config("llama", vocab_size=60, context_length=600))
    rng = random.Random(1)
    requests = [
        generation(str(i), random_prompt(rng, 90 + 80 * i, 60), max_tokens=30, n=i % 2 + 1)
        for i in range(5)
    ]

    def outcomes(make: Any) -> dict[Any, Any]:
        driven = Driven(gpt, make_decoder=make, slots=6, prefill_chunk=prefill_chunk)
        for request in requests:
            driven.add(request)
            driven.step()
        return {key: outcome.tokens for key, outcome in driven.drain().items()}

    def apart(gpt: GPT, cache: KVCache) -> Decoder:
        return WatchedDecoder(NativeDecoder(library, gpt, cache, threads=2), Timeline())

    expected = outcomes(apart)
    monkeypatch.setattr(NativeDecoder, "mixed", counted)
    assert outcomes(partial(NativeDecoder, library, threads=2)) == expected
    assert passes
    assert max(passes) <= PREFILL_ROWS + SLOTS


@pytest.mark.parametrize("kind", ["float32", "float32 cells", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_together_have_the_bits_of_each_alone(
    library: ctypes.CDLL, family: str, kind: str
) -> None:
    """In total, the prompts have more rows than the buffers hold, so one prompt is split."""
    gpt = tiny_gpt(native_config(family, n_layer=2))
    gpt = gpt.to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    cache, lengths = new_cache(gpt, 8, kept_in(kind)), (1, 120, 17, 126, 100)
    native = NativeDecoder(library, gpt, cache, threads=2, quantize=quantization(kind))
    texts = [random_ids(100 + length)[:length].tolist() for length in lengths]
    pieces = [
        PrefillInput(text[start:], slot, start)
        for slot, (text, start) in enumerate(zip(texts, (0, 32, 0, 0, 0), strict=True))
    ]
    assert sum(len(piece.token_ids) for piece in pieces) > PREFILL_ROWS
    for piece, text in zip(pieces, texts, strict=True):
        if piece.start:
            native.prefill([PrefillInput(text[: piece.start], piece.slot, 0)])
    together = native.prefill(pieces)
    for piece, text, found in zip(pieces, texts, together, strict=True):
        [alone] = native.prefill([PrefillInput(text, 7, 0)])
        assert torch.equal(found.hidden, alone.hidden[piece.start :])
        assert same_cells(cache, piece.slot, cache, 7, len(text))
    native.close()


def test_prompt_longer_than_the_buffers_is_divided(library: ctypes.CDLL) -> None:
    length = PREFILL_ROWS + 70
    gpt = tiny_gpt(native_config("gpt2", context_length=length))
    native = NativeDecoder(library, gpt, new_cache(gpt), threads=2)
    text, weights = random_ids(length).tolist(), AttentionSelection((1,), (0, 2), length)
    [whole] = native.prefill([PrefillInput(text, 0, 0, states=True, weights=weights)])
    assert torch.equal(prefilled(native, 1, text, [32, 64]), whole.hidden)
    [expected] = PlainDecoder(gpt, new_cache(gpt)).prefill(
        [PrefillInput(text, 0, 0, states=True, weights=weights)]
    )
    assert_close(whole.states, expected.states, atol=1e-4, rtol=1e-3)
    assert_close(whole.weights, expected.weights, atol=1e-5, rtol=1e-3)
    assert torch.equal(native.head(whole.hidden)[-70:], native.head(whole.hidden[-70:]))
    native.close()


@pytest.mark.parametrize("kept", get_args(KVCacheDType))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slot_hides_the_leftovers_of_an_earlier_text(
    library: ctypes.CDLL, dtype: torch.dtype, kept: KVCacheDType
) -> None:
    """Leftovers may be NaN or infinite, and vector loads of keys read beyond the last key."""
    gpt = tiny_gpt(native_config("llama", head_dim=48)).to(dtype)
    cache, text = new_cache(gpt, kept=kept), random_ids(45).tolist()
    native = NativeDecoder(library, gpt, cache, threads=2)
    expected = prefilled(native, 0, text, [])
    after = native.decode([7], [0], [45]).clone()
    for cells, lost in (
        (cache.keys if cache.key_scales is None else cache.key_scales, math.nan),
        (cache.values if cache.value_scales is None else cache.value_scales, math.inf),
    ):
        cells[:, 1].fill_(lost)
    assert torch.equal(prefilled(native, 1, text, [32]), expected)
    assert torch.equal(native.decode([7], [1], [45]), after)
    native.close()


@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf])
def test_key_that_is_not_finite_survives_int8(library: ctypes.CDLL, lost: float) -> None:
    """The logits are not finite, so the sequence ends with an error, as without int8. If the scale
    came from a maximum computed by comparisons, NaN would be lost."""
    gpt = tiny_gpt(native_config("gpt2"))
    with torch.no_grad():
        gpt.token_embedding.weight[5, 3] = lost
    for make in (PlainDecoder, partial(NativeDecoder, library, threads=1)):
        decoder = make(gpt=gpt, cache=new_cache(gpt, kept="int8"))
        with torch.inference_mode():
            decoder.prefill([PrefillInput([5, 6], 0, 0)])
            assert not decoder.decode([7], [0], [2]).isfinite().any()
        decoder.close()


@pytest.mark.parametrize("quantize", QUANTIZATIONS)
def test_prompt_by_torch_has_the_bits_of_the_twin(
    library: ctypes.CDLL, quantize: Quantization
) -> None:
    """On processors whose kernels are slow with many rows, torch computes prompts with the rounded
    weights."""
    gpt, text = tiny_gpt(native_config("modern")), random_ids(50).tolist()
    native = NativeDecoder(
        library, gpt, new_cache(gpt), threads=2, quantize=quantize, prefills=False
    )
    assert torch.equal(
        prefilled(native, 0, text, []), prefilled(PlainDecoder(gpt, new_cache(gpt)), 0, text, [])
    )
    native.close()


def test_step_beyond_the_buffers_is_refused(library: ctypes.CDLL) -> None:
    gpt = tiny_gpt(native_config("gpt2"))
    native = NativeDecoder(library, gpt, new_cache(gpt), threads=1)
    count = DRAFTED_ROWS + 1
    with pytest.raises(ValueError, match=r"17 tokens.*16"):
        native.decode([1] * count, [0] * count, list(range(count)))
    native.close()


def test_head_of_many_rows_has_the_bits_of_one_thread(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the rows of a prompt, torch uses all threads for the head if the bits stay the same."""
    gpt = tiny_gpt(tiny_config(vocab_size=2048, d_model=256, head_dim=64, n_layer=1))
    native = NativeDecoder(library, gpt, new_cache(gpt), threads=2, prefills=False)
    assert native.torch_head is not None
    keeps_bits = native.torch_head.threads_keep_bits(70)
    hidden = torch.randn(70, 256, generator=torch.Generator().manual_seed(1))
    seen: list[int] = []

    def watched(gpt: GPT, rows: Tensor, row_groups: RowGroups) -> Tensor:
        seen.append(torch.get_num_threads())
        return grouped_logits(gpt, rows, row_groups)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        monkeypatch.setattr(ContentionMonitor, "_stay_alone", lambda *times: None)
        monkeypatch.setattr(NativeDecoder, "contended", False)
        expected = torch.cat([native.head(hidden[i : i + 5]) for i in range(0, 70, 5)])
        monkeypatch.setattr(cpu_decoder, "grouped_logits", watched)
        assert torch.equal(native.head(hidden), expected)
        assert seen[-1] == (2 if keeps_bits else 1)
        monkeypatch.setattr(native.torch_head, "threads_keep_bits", lambda rows: False)
        assert torch.equal(native.head(hidden[:64]), expected[:64])
        assert seen[-1] == 1
    finally:
        torch.set_num_threads(before)
        native.close()


def test_stages_are_timed_on_request(library: ctypes.CDLL) -> None:
    """The times of the stages add up to nearly the time of the call, and timing changes no bit."""
    gpt, ids = tiny_gpt(native_config("llama", vocab_size=5000)), random_ids(3, 30)
    native = NativeDecoder(library, gpt, new_cache(gpt), threads=2)
    first = decoded(native, ids, [0, 3, 1])
    assert set(native.take_stage_seconds().values()) == {0.0}
    native.time_stages(True)
    shares = []
    for position in range(ids.shape[1]):
        began = time.perf_counter()
        logits = native.decode(ids[:, position].tolist(), [0, 3, 1], [position] * 3)
        whole = time.perf_counter() - began
        assert torch.equal(logits, first[position])
        stages = native.take_stage_seconds()
        assert stages.pop("sampling") == 0
        assert all(seconds > 0 for seconds in stages.values())
        shares.append(sum(stages.values()) / whole)
    assert max(shares) <= 1
    assert statistics.median(shares) > 0.5, "the rest of the time is spent on Python's lists"
    hidden = torch.randn(2, gpt.config.d_model)
    native.head(hidden)
    found = native.take_stage_seconds()
    assert [stage for stage, seconds in found.items() if seconds] == ["head"]
    native.time_stages(False)
    native.head(hidden)
    assert set(native.take_stage_seconds().values()) == {0.0}
    native.close()


def test_number_of_threads_changes_no_bit(library: ctypes.CDLL) -> None:
    gpt, ids = tiny_gpt(native_config("llama")), random_ids(4, 20)
    results = []
    for threads in (1, 2, 3, 5):
        native = NativeDecoder(library, gpt, new_cache(gpt), threads=threads)
        results.append(torch.stack(decoded(native, ids, [3, 1, 0, 2])))
        native.close()
    assert all(torch.equal(result, results[0]) for result in results)


@settings(
    max_examples=examples(40),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(shape=shapes(head_dims=(16, 32, 48)), data=st.data())
def test_every_shape_matches_the_twin(
    library: ctypes.CDLL, shape: dict[str, Any], data: st.DataObject
) -> None:
    gpt, vocab_size = tiny_gpt(tiny_config(**shape)), shape["vocab_size"]
    plain = PlainDecoder(gpt, new_cache(gpt))
    native = NativeDecoder(library, gpt, new_cache(gpt), threads=2)
    length = [0] * SLOTS
    for _ in range(data.draw(st.integers(1, 6))):
        slots = data.draw(
            st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True)
        )
        ids = [data.draw(st.integers(0, vocab_size - 1)) for _ in slots]
        places = [length[slot] for slot in slots]
        with torch.inference_mode():
            expected = plain.decode(ids, slots, places).clone()
        assert_close(native.decode(ids, slots, places), expected, atol=2e-3, rtol=2e-3)
        for slot in slots:
            length[slot] = 0 if data.draw(st.booleans()) and length[slot] > 3 else length[slot] + 1
    native.close()


@pytest.mark.parametrize(
    ("quantize", "least", "most_extra"), [("int8", 0.001, 2), ("int4", 0.01, 0.5)]
)
def test_quantized_decoder_computes_with_its_rounded_weights(
    library: ctypes.CDLL, quantize: Literal["int8", "int4"], least: float, most_extra: float
) -> None:
    """The decoder is compared with a model that has the dequantized weights, so the difference
    comes from rounding activations. (The expected logits of the original model were once computed
    with rounded weights too, so the error from rounding the blocks' matrices was not tested.)"""
    gpt, ids = tiny_gpt(native_config("gpt2", d_model=64, d_ff=256)), random_ids(2, 20)
    exact, twin = gpt(ids).logits, tiny_gpt(gpt.config)
    native = NativeDecoder(library, gpt, new_cache(gpt), threads=1, quantize=quantize)
    found = torch.stack(decoded(native, ids, [0, 1]), dim=1)
    native.close()
    with torch.no_grad():
        *blocks, head = matrices(twin)
        for matrix in blocks:
            matrix.copy_(quantized_matrix(matrix, quantize).dequantized())
        head.copy_(quantized_matrix(head, "int8").dequantized())
    quantized = twin(ids).logits
    assert torch.equal(gpt(ids).logits, quantized)
    loss = (quantized - exact).std() / exact.std()
    extra = (found - quantized).std() / exact.std()
    assert least < loss < 0.6
    assert 0.0005 < extra < most_extra * loss


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantized_weights_are_one_stream(
    library: ctypes.CDLL, quantize: Literal["int8", "int4"]
) -> None:
    """Each matrix once had its own block of memory, so most matrices were not on large pages."""
    gpt = tiny_gpt(native_config("gpt2", d_model=64, d_ff=256))
    native = NativeDecoder(library, gpt, new_cache(gpt), threads=1, quantize=quantize)
    kept = [
        one
        for one in native._description._alive
        if isinstance(one, Tensor) and one.dtype in (torch.int8, torch.uint8)
    ]
    native.close()
    strips = bool(library.logitd_has_strips())
    sizes = list(quantized_bytes(gpt, quantize, strips=strips))
    assert [one.numel() for one in kept] == sizes
    if quantize == "int4":
        *blocks, head = matrices(gpt)
        assert sizes == [*(len(one) * (one.shape[1] // 2 + 16 * -(-one.shape[1] // 256))
                           for one in blocks),
                         -(-len(head) // 32) * 32 * 64 if strips else head.numel()]  # fmt: skip
    assert kept[0].data_ptr() % PAGE == 0
    for before, after in pairwise(kept):
        assert after.data_ptr() == before.data_ptr() + room_for(before)


@pytest.mark.parametrize(
    ("gpt", "why"),
    [
        (tiny_gpt(tiny_config(head_dim=8)), "head_dim is 8"),
        (tiny_gpt(tiny_config(head_dim=24)), "head_dim is 24"),
        (tiny_gpt(tiny_config(head_dim=16)).half(), "float16"),
    ],
)
def test_native_decoder_refuses_unsupported_models(
    library: ctypes.CDLL, gpt: GPT, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        NativeDecoder(library, gpt, new_cache(gpt), threads=1)
