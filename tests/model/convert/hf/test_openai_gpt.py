"""Hugging Face's GPT-1: tensors are recognized by role, the computation is known from the model
family, and the folder may contain other files that the Trainer wrote."""

from pathlib import Path

import pytest
import torch
from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.convert.importing import import_model


@pytest.mark.parametrize("source", ["", "model.safetensors"])
def test_gpt_1_has_the_logits_of_transformers(source: str, tmp_path: Path) -> None:
    """GPT-1's configuration calls the tanh approximation "gelu". The importer once read the
    folder's `training_args.bin` instead of the weights. It also read the whole folder when it was
    given a single file."""
    torch.manual_seed(0)
    config = OpenAIGPTConfig(
        vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3
    )
    theirs = OpenAIGPTLMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    torch.save({"learning_rate": 1e-4}, tmp_path / "theirs" / "training_args.bin")
    import_model(tmp_path / "theirs" / source, tmp_path / "ours", tokenizer="none")
    device = torch.device("cpu")
    _, ours = load_checkpoint(tmp_path / "ours", device=device, dtype=torch.float32)
    ids = torch.arange(16)[None] * 3
    with torch.no_grad():
        difference = (ours(ids).logits[..., :50] - theirs(ids).logits).abs().max()
    assert float(difference) < 1e-4
