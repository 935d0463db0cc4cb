"""Logits, hidden states, attention, probs and scores by both clients: the values of the endpoints
and of the model itself, to the bit.
"""

from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from logitd import OnePrompt
from logitd.model.transformer.gpt import GPT
from tests.model.inference.served import forward_as_served
from tests.service.client.conftest import Connect
from tests.service.serving import Serving

PROMPT = "A prompt of more than thirty-two tokens, to have two blocks"
IDS = list(PROMPT.encode())
OTHER = "Another one"


def test_logits_are_the_models_own_to_the_bit(server: Serving, connect: Connect, gpt: GPT) -> None:
    own = forward_as_served(gpt, torch.tensor(IDS)).logits[0].numpy()
    client = connect(server.url)
    result = client.logits(PROMPT, positions="all")
    assert result.logits.dtype == np.float32
    assert np.array_equal(result.logits, own)
    assert result.token_ids.tolist() == IDS
    assert result.positions.tolist() == list(range(len(IDS)))
    assert result.stage == "raw"
    assert asdict(result.checkpoint) == server.generate("a", max_tokens=1)["checkpoint"]
    assert np.array_equal(client.logits(PROMPT).logits, own[-1:])
    chosen = client.logits(PROMPT, positions=[0, -1], token_ids=[9, 3, 9]).logits
    assert np.array_equal(chosen, own[[0, -1]][:, [9, 3, 9]])
    ranged = client.logits(PROMPT, positions={"from": 30, "to": 34})
    assert np.array_equal(ranged.logits, own[30:34])
    assert ranged.positions.tolist() == [30, 31, 32, 33]


def test_top_logits(server: Serving, connect: Connect, gpt: GPT) -> None:
    own = forward_as_served(gpt, torch.tensor(IDS)).logits[0].numpy()
    result = connect(server.url).logits(PROMPT, top_k=4, positions="all")
    order = np.argsort(-own, axis=1, kind="stable")[:, :4]
    assert np.array_equal(result.top_ids, order)
    assert np.array_equal(result.top_logits, np.take_along_axis(own, order, 1))
    assert result.token_ids.tolist() == IDS
    few = connect(server.url).logits(
        "a", top_k=3, stage="processed", processing={"allowed_token_ids": [7]}
    )
    assert few.top_ids.tolist() == [[7, -1, -1]]
    assert few.top_logits[0, 1] == -np.inf
    assert few.stage == "processed"


def test_hidden_states_and_attention_are_the_models_own_to_the_bit(
    server: Serving, connect: Connect, gpt: GPT
) -> None:
    output = forward_as_served(gpt, torch.tensor(IDS), hidden_states=True, attentions=True)
    assert output.hidden_states is not None
    assert output.attentions is not None
    states, weights = output.hidden_states[:, 0].numpy(), output.attentions[:, 0].numpy()
    client = connect(server.url)
    everything = client.hidden_states(PROMPT, positions="all")
    assert np.array_equal(everything.hidden_states, states)
    assert everything.token_ids.tolist() == IDS
    last = client.hidden_states(PROMPT, layers=[-1])
    assert np.array_equal(last.hidden_states, states[-1:, -1:])
    assert last.positions.tolist() == [len(IDS) - 1]
    looked = client.attention(PROMPT, positions="all")
    assert np.array_equal(looked.attention, weights)
    one = client.attention(PROMPT, layers=[1], heads=[0, 3], positions=[4])
    assert np.array_equal(one.attention, weights[1:2, [0, 3], 4:5])
    assert one.checkpoint == last.checkpoint


def test_of_many_prompts_there_are_many_results(
    server: Serving, connect: Connect, gpt: GPT
) -> None:
    client = connect(server.url)
    prompts: list[OnePrompt] = [PROMPT, [7, 8], OTHER]
    ids = [IDS, [7, 8], list(OTHER.encode())]
    own = [forward_as_served(gpt, torch.tensor(one)).logits[0, -1:].numpy() for one in ids]
    found = client.logits(prompts)
    assert [one.token_ids.tolist() for one in found] == ids
    assert all(np.array_equal(a.logits, b) for a, b in zip(found, own, strict=True))
    top = client.logits(prompts, top_k=1)
    assert [one.top_ids.item() for one in top] == [row.argmax() for row in own]
    assert [one.token_ids.tolist() for one in client.hidden_states(prompts)] == ids
    assert [one.attention.shape for one in client.attention(prompts)] == [
        (3, 4, 1, len(one)) for one in ids
    ]
    (single,) = client.logits([PROMPT])  # a list of one prompt gives a list of one result
    assert np.array_equal(single.logits, own[0])


def test_arrays_are_the_callers_own(server: Serving, connect: Connect) -> None:
    client = connect(server.url)
    for array in (client.logits("a").logits, client.attention("a", dtype="bfloat16").attention):
        array[:] = 0
        assert not array.any()


def test_numpy_goes_in_where_it_came_out(server: Serving, connect: Connect) -> None:
    client = connect(server.url)
    first = client.logits(PROMPT, positions="all")
    again = client.logits(first.token_ids, positions=first.positions)
    assert np.array_equal(again.logits, first.logits)
    likeliest: Any = first.logits[-1].argmax()
    zero: Any = np.float32(0)
    for prompt in (first.token_ids, [*first.token_ids]):
        choices = client.generate(
            prompt, max_tokens=1, temperature=zero, logit_bias={likeliest: -100.0}
        ).choices
        assert choices[0].token_ids != (likeliest,)
    two: Any = np.array([[1, 2], [3, 4]])
    both = client.logits(two)
    assert [one.token_ids.tolist() for one in both] == [[1, 2], [3, 4]]
