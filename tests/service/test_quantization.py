"""The cost of --quantize: measured at the start, and reported everywhere."""

import logging
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.evaluation import quantization
from logitd.model.evaluation.held_out import held_out_windows
from logitd.model.evaluation.quantization import (
    QuantizationCost,
    QuantizationLoss,
    quantization_loss,
)
from logitd.model.inference.kernels.cpu.library import KernelsUnavailable, load_library
from logitd.model.inference.kernels.select import choose_decode_path
from logitd.model.inference.memory import slot_bytes
from logitd.model.inference.options import ComputeOptions, Quantization, parse_loss_limit
from logitd.service.application.app import create_app
from logitd.service.cli.commands.serve import print_banner
from logitd.service.http.schemas import Info
from tests.model.factories import save_tiny_checkpoint, tiny_config, tiny_gpt
from tests.service.serving import Serving, eventually, serve_settings, serving, serving_app


@pytest.fixture(scope="module")
def covered(tmp_path_factory: pytest.TempPathFactory) -> CheckpointInfo:
    """A checkpoint that the native decoder covers."""
    try:
        load_library()
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
    path = tmp_path_factory.mktemp("checkpoints") / "covered"
    return save_tiny_checkpoint(path, gpt=tiny_gpt(tiny_config(head_dim=16)))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i} of a text\n" for i in range(500)), encoding="utf-8")
    return path


BUNDLED = Path(__file__).parents[2] / "checkpoints" / "python-small"
INT8: dict[str, Any] = {"kernels": "auto", "quantize": "int8", "dtype": "float32"}
INT4: dict[str, Any] = {**INT8, "quantize": "int4"}


@pytest.fixture(params=["int8", "int4"])
def kind(request: pytest.FixtureRequest) -> Quantization:
    found: Quantization = request.param
    return found


@pytest.fixture
def measured(covered: CheckpointInfo, text: Path, kind: Quantization) -> Iterator[Serving]:
    with serving(covered.path, validation_text=text, **{**INT8, "quantize": kind}) as server:
        yield server


def banner(server: Serving, capsys: pytest.CaptureFixture[str]) -> list[str]:
    print_banner(server.state.models, 1)
    return [line.partition("quantized")[2].strip() for line in capsys.readouterr().out.splitlines()
            if line.startswith("quantized")]  # fmt: skip


def measured_loss(
    covered: CheckpointInfo, text: Path, kind: Quantization, **options: str
) -> QuantizationLoss:
    gpt = load_checkpoint(covered.path, device=torch.device("cpu"), dtype=torch.float32)[1]
    _, windows = held_out_windows(covered, text)
    (batch,) = windows
    return quantization_loss(
        gpt,
        *batch,
        windows.byte_lengths,
        exact=choose_decode_path(gpt, threads=1).make_decoder,
        quantized=choose_decode_path(gpt, ComputeOptions(quantize=kind), threads=1).make_decoder,
        **options,  # type: ignore[arg-type]
    )


def test_info_and_banner_report_the_cost(
    measured: Serving,
    covered: CheckpointInfo,
    text: Path,
    kind: Quantization,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = measured_loss(covered, text, kind)
    info = Info.model_validate(measured.client.get("/info").json())
    assert info.quantization is not None
    assert info.quantization.model_dump() == {
        "kind": kind,
        "kv_cache_dtype": "auto",
        "relative_loss": expected.relative,
        "bits_per_byte": expected.quantized,
        "exact_bits_per_byte": expected.exact,
        "tokens": 2048,
        "text": str(text),
    }
    assert expected.quantized != expected.exact
    assert banner(measured, capsys) == [
        f"{kind} costs {percent(expected)} % ({expected.quantized:.4f} instead of "
        f"{expected.exact:.4f} bits per byte over 2,048 tokens of {text})"
    ]


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_cost_of_int8_keys_and_values_is_reported(
    covered: CheckpointInfo, text: Path, quantize: Quantization, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = measured_loss(covered, text, quantize, kept="int8")
    settings = {**INT8, "quantize": quantize, "kv_cache_dtype": "int8"}
    with serving(covered.path, validation_text=text, **settings) as server:
        info = Info.model_validate(server.client.get("/info").json())
        (sentence,) = banner(server, capsys)
        exact = server.json("/generate", {"prompt": "line 1", "max_tokens": 3})
    assert exact["usage"]["completion_tokens"] == 3
    assert info.quantization is not None
    assert (info.quantization.kind, info.quantization.kv_cache_dtype) == (quantize, "int8")
    assert info.quantization.relative_loss == expected.relative
    assert expected.quantized != expected.exact
    what = "int8 of keys and values" if quantize == "none" else "int8 with int8 of keys and values"
    assert sentence.startswith(f"{what} costs {percent(expected)} % (")
    slot = slot_bytes(covered.config, 4, "int8")
    assert info.kv_cache_bytes == info.slots * slot
    assert slot < 0.4 * slot_bytes(covered.config, 4)


def test_served_weights_are_rounded_once(
    measured: Serving, covered: CheckpointInfo, kind: Quantization
) -> None:
    """The measurement of the loss rounds a copy of the weights, so the engine still starts from the
    exact weights."""
    with serving(covered.path, validation_text=None, **{**INT8, "quantize": kind}) as other:
        body = {"prompt": "line 1", "seed": 1, "max_tokens": 20, "logprobs": 1}
        replies = [each.json("/generate", body) for each in (measured, other)]
    assert replies[0]["choices"] == replies[1]["choices"]


def test_without_a_text_the_missing_measurement_is_reported(
    covered: CheckpointInfo, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), serving(covered.path, **INT8) as server:
        info = Info.model_validate(server.client.get("/info").json())
        assert info.quantization is not None
        assert info.quantization.relative_loss is None
        assert "no held-out text" in info.quantization.text
        (sentence,) = banner(server, capsys)
    assert sentence.startswith("the cost of int8 was not measured: the checkpoint has no held-out")
    assert sentence.endswith("; name a text with --validation-text")
    assert [r.levelname for r in caplog.records if sentence in r.message] == ["WARNING"]


def test_banner_without_quantization_has_no_cost(
    server: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    assert banner(server, capsys) == []


@pytest.mark.parametrize(("threshold", "level"), [(-1.0, "WARNING"), (1.0, "INFO")])
def test_large_loss_is_a_warning(
    covered: CheckpointInfo, text: Path, threshold: float, level: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(quantization, "WARN_ABOVE", threshold)
    with caplog.at_level(logging.INFO), serving(covered.path, validation_text=text, **INT8):
        pass
    assert [r.levelname for r in caplog.records if r.message.startswith("int8 costs")] == [level]


def percent(loss: QuantizationLoss) -> str:
    return f"{100 * loss.relative:.2f}".replace("-0.00", "0.00")


@pytest.mark.parametrize(
    ("exact", "quantized", "sentence"),
    [
        (1.0695, 1.0702, "int8 costs 0.07 % (1.0702 instead of 1.0695 bits per byte over 3,072"),
        # The banner used to report a cost of -0.00 %.
        (1.06952, 1.06951, "int8 costs 0.00 % ("),
    ],
)
def test_sentence_has_the_cost(exact: float, quantized: float, sentence: str) -> None:
    loss = QuantizationLoss(exact=exact, quantized=quantized, tokens=3072)
    assert QuantizationCost("int8", loss, "notes.txt").sentence().startswith(sentence)


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        ("short", INT8, "has 6 tokens; measuring a loss needs more than 1,024"),
        (None, INT8, "is not a file, a folder or a glob that matches a file"),
        ("x" * 2000, {}, "quantize is none: set quantize to int8 or int4, or kv_cache_dtype to "),
    ],
)
def test_unusable_text_is_refused(
    covered: CheckpointInfo, tmp_path: Path, content: str | None, settings: dict[str, Any],
    message: str, logged_errors: list[str],
) -> None:  # fmt: skip
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_text(content)
    app = create_app(serve_settings(covered.path, validation_text=path, **settings))
    with serving_app(app) as server:
        eventually(lambda: server.state.status()[0] == "failed")
        assert message in str(server.state.status()[1])
    assert message in logged_errors[0]
    logged_errors.clear()


def test_loss_above_the_bound_is_refused(logged_errors: list[str]) -> None:
    """Uses the bundled checkpoint and text like its training data, because rounding may lower the
    loss of other weights and texts."""
    try:
        load_library()
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
    given = {**INT4, "validation_text": Path(os.__file__), "max_quantization_loss": "0.01%"}
    app = create_app(serve_settings(BUNDLED, **given))
    with serving_app(app) as server:
        eventually(lambda: server.state.status()[0] == "failed")
        found = str(server.state.status()[1])
    assert re.match(
        r"int4 costs 0\.\d\d % \(\d\.\d{4} instead of \d\.\d{4} bits per byte over 2,048 tokens of "
        r".*\), but max_quantization_loss is 0\.01%: set quantize to int8, or "
        r"raise max_quantization_loss \('any' means no limit\)$",
        found,
    )
    assert found in logged_errors[0]
    logged_errors.clear()


@pytest.mark.parametrize(
    ("written", "share"),
    [("2%", 0.02), ("0.5 %", 0.005), ("3", 0.03), ("0%", 0), ("any", math.inf)],
)
def test_bound_has_several_spellings(written: str, share: float) -> None:
    assert parse_loss_limit(written) == share


@pytest.mark.parametrize("written", ["", "%", "-1%", "2%%", "nan", "inf", "1e9", "2 %o"])
def test_invalid_bound_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match=r"2% or 0\.5%, or any"):
        parse_loss_limit(written)
