"""The steps that every import takes after reading the weights: it adapts rows, padding and
names."""

import gzip
from pathlib import Path

import pytest
import torch

from logitd.model.convert.check_text import read_check_text
from logitd.model.convert.foreign import ConvertError, ForeignModel, ForeignTokenizer
from logitd.model.convert.importing import _fitted, import_model
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
