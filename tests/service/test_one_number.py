"""The loss of a window of text, computed in all four ways: by the trainer's evaluation, `logitd
eval`, `LLM.score` and POST /score.
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.data.shards import open_shard, write_shard
from logitd.model.data.vocabulary import tokenizer_sha256
from logitd.model.data.windows import rolling_windows
from logitd.model.evaluation.text_loss import text_loss
from logitd.model.llm import LLM
from logitd.model.training.configuration.presets import PRESETS
from logitd.model.training.step.forward import Forward, training_placement
from logitd.model.training.step.validate import validate
from tests.model.conftest import story
from tests.model.factories import save_tiny_checkpoint, tiny_config, tiny_gpt
from tests.service.serving import serving

TEXT = story(20)[:300]
TRAINERS_ROUNDING = 1e-5
"""Largest relative difference between the trainer's loss and the other three. The trainer's
forward pass sums in a different order: it computes attention in one fused operation, and all
windows in one matrix product."""
SHAPES = {
    "gpt-2": tiny_config(context_length=512, head_dim=16, n_layer=3),
    "default": replace(
        PRESETS["tiny"].config(257),
        context_length=512,
        n_layer=3,
        d_model=64,
        n_head=4,
        n_kv_head=4,
        head_dim=16,
        rotary_dim=16,
        d_ff=128,
    ),
}


def _trainers_loss(path: Path, ids: list[int], folder: Path) -> float:
    info, gpt = load_checkpoint(path, device=torch.device("cpu"), dtype=torch.float32)
    identity = tokenizer_sha256(info.tokenizer)
    with write_shard(folder / "ids", vocab_size=257, tokenizer_sha256=identity) as writer:
        writer.append(ids, len(ids) - 1)
    shard = open_shard(folder / "ids", identity)
    windows = rolling_windows(shard, info.tokenizer, window=512, stride=512, batch_size=4)
    forward = Forward(gpt, training_placement("cpu", "float32", 1), dropout=0.0)
    return validate(gpt, windows, forward).loss


@pytest.mark.parametrize("shape", SHAPES)
def test_one_window_has_one_loss(shape: str, tmp_path: Path) -> None:
    """In float32 on a CPU, `logitd eval`, `LLM.score` and POST /score return the same bits, and the
    trainer's evaluation agrees within its rounding."""
    path = save_tiny_checkpoint(tmp_path / "tiny", gpt=tiny_gpt(SHAPES[shape])).path
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    ids = [*TEXT.encode(), 256]
    measured = text_loss(path, [str(text)], dtype="float32", threads=1).evaluation
    with LLM(path, dtype="float32", threads=1) as llm:
        (score,) = llm.score(ids)
    with serving(path, dtype="float32", threads=1, kernels="auto") as running:
        (reply,) = running.json("/score", {"prompt": ids, "logprobs": 0})["prompts"]
    tokens = reply["score"]["tokens"][1:]
    assert [token["logprob"] for token in tokens] == score.logprobs.tolist()
    assert -math.fsum(score.logprobs) / len(tokens) == measured.loss
    assert measured.tokens == len(tokens)
    assert reply["score"]["bits_per_byte"] == pytest.approx(measured.bits_per_byte)
    trainers = _trainers_loss(path, ids, tmp_path)
    assert trainers == pytest.approx(measured.loss, rel=TRAINERS_ROUNDING)
