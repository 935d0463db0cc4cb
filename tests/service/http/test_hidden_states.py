"""POST /hidden_states and /attention: the model's own values bit for bit."""

from typing import Any

import numpy as np
import pytest
import torch

from logitd.model.transformer.gpt import GPT
from tests.model.inference.served import forward_as_served
from tests.service.http.asking import IDS, Array, npy
from tests.service.serving import Serving


@pytest.fixture(scope="module")
def states(gpt: GPT) -> Array:
    """Hidden states (n_layer + 1, T, d_model) of PROMPT, from the model's own forward pass."""
    output = forward_as_served(gpt, torch.tensor(IDS), hidden_states=True)
    assert output.hidden_states is not None
    return output.hidden_states[:, 0].numpy()


@pytest.fixture(scope="module")
def weights(gpt: GPT) -> Array:
    """Attention weights (n_layer, n_head, T, T) of PROMPT."""
    output = forward_as_served(gpt, torch.tensor(IDS), attentions=True)
    assert output.attentions is not None
    return output.attentions[:, 0].numpy()


@pytest.mark.parametrize(
    ("layers", "positions"),
    [
        (None, "all"),
        (None, "last"),
        ([0], [0, 31, 32, -1]),
        ([-1], {"from": 10, "to": 40}),
        ([0, -1], {"from": -3}),
    ],
)
def test_hidden_states_are_the_models_own_to_the_bit(
    server: Serving, states: Array, layers: list[int] | None, positions: Any
) -> None:
    rows = {
        "all": slice(None),
        "last": slice(-1, None),
        str({"from": 10, "to": 40}): slice(10, 40),
        str({"from": -3}): slice(-3, None),
    }.get(str(positions), positions)
    expected = states[slice(None) if layers is None else layers][:, rows]
    fields = {"positions": positions} | ({} if layers is None else {"layers": layers})
    assert np.array_equal(npy(server, "/hidden_states", **fields), expected)


@pytest.mark.parametrize(
    ("layers", "heads"), [(None, None), ([0], None), ([-1, 2][:1], [0]), ([0, 2], [1, -1])]
)
def test_attention_is_the_models_own_to_the_bit(
    server: Serving, weights: Array, layers: list[int] | None, heads: list[int] | None
) -> None:
    expected = weights[slice(None) if layers is None else layers]
    expected = expected[:, slice(None) if heads is None else heads]
    fields: dict[str, Any] = {"positions": "all"}
    fields |= {} if layers is None else {"layers": layers}
    fields |= {} if heads is None else {"heads": heads}
    found = npy(server, "/attention", **fields)
    assert np.array_equal(found, expected)
    assert np.allclose(found.sum(axis=-1), 1, atol=1e-5)
    assert not np.triu(found, 1).any(), "nothing looks ahead"
