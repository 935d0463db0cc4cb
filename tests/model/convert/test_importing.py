"""The steps that every import takes after reading the weights: it adapts rows, padding and
names."""

import gzip
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_model
from torch.testing import assert_close
from transformers import GPT2Config, GPT2LMHeadModel

from logitd.model.convert.check_text import read_check_text
from logitd.model.convert.foreign import ConvertError, ForeignModel, ForeignTokenizer
from logitd.model.convert.importing import _fitted, import_model
from tests.model.convert.test_nanogpt import logits_of, save, small
from tests.model.convert.theirs import loaded
from tests.model.factories import byte_tokenizer, tiny_config, tiny_gpt


def test_head_bias_moves_with_its_rows_and_is_padded() -> None:
    gpt = tiny_gpt(tiny_config(vocab_size=300, padded_vocab_size=300, head_bias=True, n_layer=1))
    weights = gpt.state_dict()
    model = ForeignModel(kind="here", config=gpt.config, weights=weights, dtype=torch.float32)
    order = [*range(299, 43, -1), 7]
    vocabulary = ForeignTokenizer(tokenizer=byte_tokenizer(), order=order)
    config, fitted = _fitted(model, vocabulary, None)
    assert (config.vocab_size, config.padded_vocab_size) == (257, 320)
    assert torch.equal(fitted["head.bias"][:257], weights["head.bias"][order])
    assert fitted["head.bias"].shape == (320,)
    assert not fitted["head.bias"][257:].any()
    moved = tiny_gpt(config)
    moved.load_state_dict(fitted)
    ids = torch.tensor([[3, 200, 256]])
    theirs = gpt(torch.tensor([[order[token_id] for token_id in ids[0]]])).logits
    assert torch.equal(moved(ids).logits, theirs[..., order])


def test_missing_check_text_is_reported_before_the_source_is_opened(tmp_path: Path) -> None:
    with pytest.raises(
        ConvertError, match=r"^--check .*gone\.txt: .* is not a file, a folder or a"
    ):
        import_model(tmp_path / "gone.pt", tmp_path / "ours", check=tmp_path / "gone.txt")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", b"one\r\ntwo"),
        ("a.txt", b'{"text": "one"}\n{"text": "two"}\n'),
        ("a.csv.gz", gzip.compress(b"text\none\ntwo\n", mtime=0)),
    ],
)
def test_check_text_is_read_as_in_training(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    vocabulary = ForeignTokenizer(tokenizer=byte_tokenizer())
    found = read_check_text(tmp_path / name, [tmp_path / name], vocabulary)
    assert (found.name, bytes(found.token_ids)) == (name, b"one\ntwo")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "config.json"])
def test_named_file_is_imported_instead_of_others_in_its_folder(name: str, tmp_path: Path) -> None:
    save(tmp_path / "ckpt.pt", small(40), iter_num=100)
    size = GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=32, vocab_size=40)
    theirs = GPT2LMHeadModel(size).eval()
    if name == "pytorch_model.bin":
        save(tmp_path / name, named := small(40), iter_num=999)
        expected = logits_of(named, [1, 2, 3])
    else:
        theirs.save_pretrained(tmp_path)
        expected = theirs(torch.tensor([[1, 2, 3]])).logits
    import_model(tmp_path / name, tmp_path / "ours", tokenizer="none")
    info, gpt = loaded(tmp_path / "ours")
    assert_close(gpt(torch.tensor([[1, 2, 3]])).logits[..., :40], expected, atol=1e-4, rtol=1e-4)
    assert info.training.step == (999 if name == "pytorch_model.bin" else 0)
    with pytest.raises(ConvertError, match=r"a model of nanoGPT and .*: import one of them by its"):
        import_model(tmp_path, tmp_path / "both", tokenizer="none")


def test_named_file_without_configuration_is_recognized_by_role(tmp_path: Path) -> None:
    save(tmp_path / "ckpt.pt", small(40))
    save_model(small(40), str(tmp_path / "model.safetensors"))
    with pytest.raises(ConvertError, match=r"(?s)model\.safetensors.*--n-head"):
        import_model(tmp_path / "model.safetensors", tmp_path / "ours", tokenizer="none")
