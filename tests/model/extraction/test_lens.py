"""With real checkpoints, the values of `--lens` equal those of `LLM.lens` and `LLM.score` bit for
bit, and its columns are added to the rows of `--logprobs`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from logitd.model.extraction.errors import ExtractionError
from logitd.model.extraction.quantities import (
    LENS_TOP_K,
    SHARD_BYTES,
    SHARD_TOKENS,
    WINDOW_BYTES,
    LensFigures,
    Logprobs,
    choose_lens,
)
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.kernels.cpu.library import KernelsUnavailable, load_library
from logitd.model.llm import LLM
from logitd.model.transformer.shapes import MODERN
from tests.model.extraction.conftest import TORCH, Extract, in_memory
from tests.model.extraction.test_run import CONTEXT, rows_of
from tests.model.factories import save_tiny_checkpoint, tiny_config, tiny_gpt

TOP_K = 3
FIGURES = ("logprobs", "ranks", "entropies", "divergences", "top_tokens", "top_logprobs")
EVERY_ID = range(257)


def opened(path: Path) -> LLM:
    return LLM(path, device="cpu", dtype="float32", threads=1, kernels="torch")


@pytest.fixture(scope="module")
def llm(checkpoint_path: Path) -> Any:
    with opened(checkpoint_path) as llm:
        yield llm


def by_llm(llm: LLM, text: str, stride: int) -> list[dict[str, Any] | None]:
    """The lens figures of each token, computed with LLM.lens and LLM.score, window by window."""
    ids = list(text.encode())
    figures: list[dict[str, Any] | None] = [None]
    for start in range(0, len(ids), stride):
        window = ids[start : start + CONTEXT]
        first = CONTEXT - stride if start else 1  # token that this window counts
        if len(window) <= first:
            continue
        (score,) = llm.score(window[:first], [window[first:]])
        lens = llm.lens(window, top_k=TOP_K, token_ids=EVERY_ID)[first - 1 : -1]
        for token, own, layers in zip(window[first:], score.logprobs, lens, strict=True):
            logprobs = [layer.logprobs[token].item() for layer in layers]
            logprobs[-1] = float(np.float32(own))
            figures.append(
                {
                    "logprobs": logprobs,
                    "ranks": [layer.ranks[token] for layer in layers],
                    "entropies": [layer.entropy for layer in layers],
                    "divergences": [layer.divergence for layer in layers],
                    "top_tokens": [layer.top_ids.tolist() for layer in layers],
                    "top_logprobs": [layer.top_logprobs.tolist() for layer in layers],
                }
            )
    return figures


@pytest.mark.parametrize("stride", [None, 50])
def test_lens_equals_the_llm_to_the_bit(
    extracting: Extract, llm: LLM, texts: Path, stride: int | None
) -> None:
    result = extracting(lens=True, top_k=TOP_K, stride=stride, shard_tokens=150)
    expected = [
        {
            "document": document,
            "source": source,
            "position": position,
            "token": token,
            **{f"layer_{name}": by_hand and by_hand[name] for name in FIGURES},
        }
        for document, (source, text) in enumerate(in_memory(texts))
        for position, (token, by_hand) in enumerate(
            zip(text.encode(), by_llm(llm, text, stride or CONTEXT - 1), strict=True)
        )
    ]
    rows = rows_of(result.path)
    assert rows == expected
    assert result.rows == result.tokens == len(rows)
    assert result.shards > 3


def placings() -> list[Any]:
    """Options for the plain decoder and for the native one, which is skipped if it cannot be
    built."""
    try:
        load_library()
    except KernelsUnavailable as error:
        marks: Any = pytest.mark.skip(str(error))
    else:
        marks = ()
    native = [
        replace(TORCH, kernels="native"),
        replace(TORCH, kernels="native", threads=2, dtype="bfloat16"),
        replace(TORCH, kernels="native", threads=2, quantize="int8"),
    ]
    return [TORCH, *(pytest.param(options, marks=marks) for options in native)]


@pytest.mark.parametrize("stride", [77, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", placings())
def test_last_layer_equals_the_logprobs_to_the_bit(
    extracting: Extract, tmp_path: Path, options: Any, stride: int | None
) -> None:
    """Only the logprobs of the likeliest tokens may differ, by the rounding of a float64 sum."""
    gpt = tiny_gpt(tiny_config(**MODERN, head_dim=16))
    path = save_tiny_checkpoint(tmp_path / "wide", gpt).path
    asked: dict[str, Any] = {"checkpoint": path, "options": options, "stride": stride}
    lens = rows_of(extracting(tmp_path / "lens", lens=True, top_k=TOP_K, **asked).path)
    scores = rows_of(extracting(tmp_path / "scores", top_k=TOP_K, **asked).path)
    for figures, scored in zip(lens, scores, strict=True):
        for name in ("document", "source", "position", "token"):
            assert figures[name] == scored[name]
        if scored["logprob"] is None:
            assert all(figures[f"layer_{name}"] is None for name in FIGURES)
            continue
        assert figures["layer_logprobs"][-1] == scored["logprob"]
        assert figures["layer_top_tokens"][-1] == scored["top_tokens"]
        np.testing.assert_allclose(figures["layer_top_logprobs"][-1], scored["top_logprobs"], 2e-7)


def test_default_number_of_likeliest_tokens_is_that_of_post_lens(extracting: Extract) -> None:
    row = rows_of(extracting(lens=True).path)[1]
    assert [len(tokens) for tokens in row["layer_top_tokens"]] == [LENS_TOP_K] * 4


def test_single_tokens_have_empty_rows(extracting: Extract, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "x"}\n{"text": "y"}\n')
    result = extracting(lens=True, data=(str(tmp_path / "x.jsonl"),))
    rows = rows_of(result.path)
    assert [(row["document"], row["token"]) for row in rows] == [(0, ord("x")), (1, ord("y"))]
    assert all(row[f"layer_{name}"] is None for row in rows for name in FIGURES)
    assert result.tokens == 2


# Bounds


def test_default_shard_fills_its_bytes() -> None:
    config = tiny_config()
    assert choose_lens(1, config).shard_tokens(config) == SHARD_TOKENS  # 96 bytes a token
    wide = choose_lens(257, config)
    row = 4 * (257 * (4 + 4) + 16)  # for each of four layers: an id and a logprob, and four figures
    assert wide.shard_tokens(config) == SHARD_BYTES // row < SHARD_TOKENS
    assert LensFigures(layers=100, top_k=10**7).shard_tokens(config) == 1
    assert Logprobs(127).shard_tokens(config) == SHARD_TOKENS
    assert Logprobs(1000).shard_tokens(config) == SHARD_BYTES // 8004


def test_window_beyond_its_limit_is_refused() -> None:
    config = tiny_config(vocab_size=100_000, context_length=4096, d_model=16, n_head=2)
    most = (WINDOW_BYTES // (4096 * 4) - 16) // 8
    assert choose_lens(most, config).top_k == most
    with pytest.raises(ExtractionError, match=f"top_k is {most + 1}.*--top-k {most} "):
        choose_lens(most + 1, config)
    longest = tiny_config(context_length=2**24, positions="rotary")
    with pytest.raises(ExtractionError, match=r"top_k is 1.*--stages"):
        choose_lens(1, longest)


@pytest.mark.parametrize(
    ("top_k", "changes", "message"),
    [
        (258, {}, "top_k.*258.*257"),
        (1, {"context_length": 1}, "context is 1 .*--stages"),
        (1, {"vocab_size": 2**24 + 1}, "16777216"),
    ],
)
def test_lens_beyond_the_model_is_refused(
    top_k: int, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((ExtractionError, InvalidRequest), match=message):
        choose_lens(top_k, tiny_config(**changes))


def test_layers_that_are_not_finite_are_refused(extracting: Extract, tmp_path: Path) -> None:
    gpt = tiny_gpt()
    with torch.no_grad():
        gpt.get_parameter("final_norm.weight").mul_(2e38)
    path = save_tiny_checkpoint(tmp_path / "broken", gpt).path
    with pytest.raises(ExtractionError, match=r"token 0 .*finite"):
        extracting(checkpoint=path, lens=True)
