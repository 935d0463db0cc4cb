"""The loss of a checkpoint on a text, compared with the losses computed from the model's forward
pass and by the trainer."""

import resource
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.data.errors import DataError
from logitd.model.data.sources import files
from logitd.model.data.sources.python_text import python_text
from logitd.model.data.sources.read_options import ReadOptions
from logitd.model.evaluation import text_loss as module
from logitd.model.evaluation.quantization import new_decoder
from logitd.model.evaluation.text_loss import text_loss
from logitd.model.training.step.validate import bits_per_byte
from logitd.model.training.trainer import train
from tests.model.conftest import Configure, story
from tests.model.factories import (
    chat_tokenizer,
    save_tiny_checkpoint,
    tiny_config,
    tiny_gpt,
    training_record,
)

TEXT = "a short text – “said” twice, a short text."


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a context of 64 tokens and a head width that the native decoder supports."""
    gpt = tiny_gpt(tiny_config(context_length=64, head_dim=16, n_layer=2))
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", gpt=gpt).path


@pytest.fixture
def short(tmp_path: Path) -> Path:
    path = tmp_path / "short.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def forward_nats(path: Path, ids: list[int]) -> torch.Tensor:
    """The loss in nats of each id except the first: (T - 1,)."""
    _, gpt = load_checkpoint(path, device=torch.device("cpu"), dtype=torch.float32)
    logits = gpt(torch.tensor([ids[:-1]])).logits[0]
    return F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")


def test_loss_of_a_short_text_is_the_forwards(tiny: Path, short: Path) -> None:
    measured = text_loss(tiny, [str(short)], dtype="float32", threads=1)
    ids = [*TEXT.encode(), 256]
    nats = forward_nats(tiny, ids)
    evaluation = measured.evaluation
    assert (evaluation.tokens, evaluation.text_bytes) == (len(ids) - 1, len(ids) - 2)
    assert evaluation.loss == pytest.approx(float(nats.mean()), rel=1e-6)
    assert evaluation.perplexity == pytest.approx(float(nats.mean().exp()), rel=1e-5)
    bits = bits_per_byte(float(nats.sum()), len(ids) - 2)
    assert evaluation.bits_per_byte == pytest.approx(bits, rel=1e-6)
    assert (measured.text, measured.window, measured.placement.dtype_name) == (
        str(short),
        len(ids) - 1,
        "float32",
    )


def test_overlapping_windows_predict_from_more_context(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(story(8)[:150], encoding="utf-8")
    ids = [*path.read_bytes(), 256]
    expected = list(forward_nats(tiny, ids[:65]))
    for end in range(65, 151, 10):
        end = min(end + 9, 150)
        counted = min(10, end - len(expected))
        expected += list(forward_nats(tiny, ids[end - 64 : end + 1])[-counted:])
    assert len(expected) == 150
    measured = text_loss(tiny, [str(path)], stride=10, dtype="float32", threads=1, batch_size=3)
    assert measured.evaluation.tokens == 150
    assert measured.evaluation.loss == pytest.approx(float(torch.stack(expected).mean()), rel=1e-5)
    assert measured.stride == 10


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_loss_on_a_runs_held_out_text_is_the_trainers(configure: Configure, dtype: Any) -> None:
    """The two losses differ slightly, because the trainer leaves out the tokens after the last
    whole window."""
    result = train(configure(dtype=dtype, eval_batches=10_000))
    measured = text_loss(result.checkpoint, dtype=dtype, threads=1)
    assert measured.text == "the run's validation text"
    tokens = measured.evaluation.tokens
    assert tokens - 32 < tokens // 32 * 32 <= tokens
    assert measured.evaluation.loss == pytest.approx(result.val_loss, rel=0.01)
    assert measured.placement.dtype_name == dtype


def test_several_texts_are_consecutive_documents(tiny: Path, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"only {name}")
    measured = text_loss(tiny, [str(tmp_path / "*.txt")], dtype="float32", threads=1)
    ids = [*b"only a", 256, *b"only b", 256]
    assert measured.evaluation.text_bytes == 11, "the first byte is not predicted"
    assert measured.evaluation.loss == pytest.approx(
        float(forward_nats(tiny, ids).mean()), rel=1e-6
    )


@pytest.mark.parametrize(
    "rounded", [{"quantize": "int8", "stride": 40}, {"kv_cache_dtype": "int8"}]
)
def test_decoder_measures_quantized_numbers(
    tiny: Path, tmp_path: Path, rounded: dict[str, Any]
) -> None:
    path = tmp_path / "text.txt"
    path.write_text(story(20), encoding="utf-8")
    exact = text_loss(tiny, [str(path)], dtype="float32", threads=1).evaluation
    measured = text_loss(tiny, [str(path)], dtype="float32", threads=1, batch_size=3, **rounded)
    assert measured.evaluation.tokens == exact.tokens
    assert measured.evaluation.text_bytes == exact.text_bytes
    assert 0 < abs(measured.evaluation.loss / exact.loss - 1) < 0.05
    assert (measured.options.quantize != "none") == ("quantize" in rounded)
    assert measured.stride == rounded.get("stride", 64)


def test_text_loss_restores_the_thread_count(tiny: Path, short: Path) -> None:
    before = torch.get_num_threads()
    text_loss(tiny, [str(short)], threads=before + 1)
    assert torch.get_num_threads() == before


def test_text_loss_refuses_an_impossible_request(tiny: Path, short: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"stride is 65.* 64"):
        text_loss(tiny, [str(tmp_path / "missing.txt")], stride=65)
    with pytest.raises(DataError, match="no held-out text"):
        text_loss(tiny)
    with pytest.raises(DataError, match=r"nowhere\.txt is not a file"):
        text_loss(tiny, [str(tmp_path / "nowhere.txt")])
    with pytest.raises(DataError, match=r"--text-field.* text of --data"):
        text_loss(tiny, reading=ReadOptions(split_at="--"))


def test_full_disk_is_explained(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a" * 20_000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(DataError, match=r"stored in .*File too large.* TMPDIR"):
            text_loss(tiny, [str(path)], dtype="float32", threads=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_batch_is_no_larger_than_the_text(
    tiny: Path, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = []

    def noted(*arguments: Any) -> Any:
        slots.append(arguments[2])
        return new_decoder(*arguments)

    monkeypatch.setattr(module, "new_decoder", noted)
    text_loss(tiny, [str(short)], dtype="float32", threads=1, batch_size=1000)
    assert slots == [1]


def test_whole_held_out_part_of_pythons_text_is_measured(tmp_path: Path) -> None:
    """`logitd serve` measures the loss only on a sample of this text."""
    try:
        python_text(Path(sysconfig.get_path("stdlib")))
    except DataError as reason:
        pytest.skip(str(reason))
    data: dict[str, Any] = {"name": "x", "licence": "y", "built_in": True}
    data |= {"val_bytes": 300_000, "bytes": 8_000_000}  # an older record, without val_fraction
    gpt = tiny_gpt(tiny_config(context_length=512, n_layer=1, d_model=8, n_head=1, vocab_size=259))
    info = save_tiny_checkpoint(
        tmp_path / "python",
        gpt=gpt,
        tokenizer=chat_tokenizer(),
        training=training_record(data=data),
    )
    measured = text_loss(info.path, batch_size=64, dtype="float32", threads=1)
    assert measured.text == "the validation part of Python's own text"
    assert 250_000 < measured.evaluation.text_bytes < 350_000
    assert read_checkpoint(info.path).training.data == data


def test_name_at_a_border_of_pieces_is_one_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PIECE", 20)
    tokenizer = chat_tokenizer()
    gpt = tiny_gpt(tiny_config(vocab_size=tokenizer.vocab_size))
    record = training_record(data={"name": "a", "licence": "MIT", "special_tokens": "ids"})
    info = save_tiny_checkpoint(tmp_path / "a", gpt, tokenizer=tokenizer, training=record)
    path = tmp_path / "a.txt"
    path.write_text("x" * 14 + "<|im_end|>")
    measured = text_loss(info.path, [str(path)], dtype="float32", threads=1)
    assert measured.evaluation.tokens == 14 + 1 + 1 - 1
