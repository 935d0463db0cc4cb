"""Value maps of the trainer compared with the tables of the checkpoint that is made from them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from logitd.model.training.configuration.presets import PRESETS
from logitd.model.training.optim.optimizers import initialize
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.shapes import MODERN
from logitd.model.transformer.value_map import ValueMap, with_tables
from tests.model.factories import tiny_config

ALL = {**MODERN, "value_embeddings": "all", "n_kv_head": 1}


def _mapped(**shape: Any) -> GPT:
    gpt = GPT(tiny_config(**{**ALL, **shape})).double()
    initialize(gpt, PRESETS["tiny"].recipe, torch.Generator().manual_seed(1))
    for block in gpt.blocks:  # zero at the start: a value would have no effect
        torch.nn.init.normal_(block.attention_out.weight, std=0.3)  # type: ignore[union-attr,arg-type]
    return gpt.double()


@pytest.mark.parametrize("count", [8, 400])
@pytest.mark.parametrize("shape", [{}, {"tied_head": True, "embedding_norm": True}])
def test_model_with_tables_computes_the_same(shape: dict[str, Any], count: int) -> None:
    """One batch has fewer tokens than the table has rows, and the other has more."""
    gpt = _mapped(**shape)
    served = GPT(gpt.config).double()
    served.load_state_dict(with_tables(gpt.state_dict()))
    ids = torch.randint(gpt.config.vocab_size, (count // 8, 8))
    torch.testing.assert_close(gpt(ids).logits, served(ids).logits, rtol=1e-9, atol=1e-9)
    zero = {
        name: 0 * each if "value_emb" in name else each for name, each in gpt.state_dict().items()
    }
    served.load_state_dict(with_tables(zero))
    assert not torch.allclose(gpt(ids).logits, served(ids).logits)


def test_gradients_are_those_of_the_map_of_each_token() -> None:
    gpt = _mapped()
    value_map = gpt.blocks[0].value_embedding
    assert isinstance(value_map, ValueMap)
    ids = torch.randint(gpt.config.vocab_size, (60, 8))

    def gradients(values: Tensor) -> list[Tensor]:
        torch.manual_seed(2)
        loss = (values * torch.randn(values.shape).double()).sum()
        return list(torch.autograd.grad(loss, [value_map.map, gpt.token_embedding.weight]))

    each = torch.nn.functional.linear(gpt.token_embedding(ids), value_map.map)
    torch.testing.assert_close(gradients(value_map(ids)), gradients(each))


def test_every_block_has_a_map_of_its_own_and_the_embedding_counts_once() -> None:
    gpt = _mapped()
    maps = [name for name, _ in gpt.named_parameters() if name.endswith("value_embedding.map")]
    assert len(maps) == gpt.config.n_layer == 3
    names = [name for name in gpt.state_dict() if "value_embedding" in name]
    assert names == maps
    weights = GPT(gpt.config).state_dict()
    assert with_tables(weights).keys() == weights.keys() == with_tables(gpt.state_dict()).keys()
