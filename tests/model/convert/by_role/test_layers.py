"""Layers: a model that lacks a part of a GPT is refused, and the message names the parts that it
has."""

import pytest
import torch

from logitd.model.convert.by_role.recognize import recognize
from logitd.model.convert.foreign import ConvertError


def test_file_without_a_gpt_is_described() -> None:
    picture = {"conv1.weight": torch.ones(8, 3, 3, 3), "fc.weight": torch.ones(10, 8)}
    with pytest.raises(ConvertError, match=r"model\.pt has no layers of a GPT: .* fc\.weight"):
        recognize("model.pt", picture)
    with pytest.raises(ConvertError, match=r"has no layers of a GPT: .*no float tensor"):
        recognize("model.pt", {})


def test_model_without_attention_is_refused() -> None:
    """A stack of perceptrons also has layers, each with two matrices."""
    tensors = {f"layers.{n}.linear{k}.weight": torch.ones(32, 32) for n in range(3) for k in (1, 2)}
    with pytest.raises(ConvertError, match="has no layers of a GPT"):
        recognize("model.pt", tensors | {"emb.weight": torch.ones(29, 32)})
