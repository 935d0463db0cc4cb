"""POST /lens: predictions after each layer, over HTTP."""

from typing import Any

import numpy as np
import pytest

from logitd.model.inference.sampling.distribution import summarize
from logitd.model.operations.lens import LensReply, PromptLens
from tests.service.http.asking import PROMPT
from tests.service.serving import Serving, read_chunks, request_bytes


def lens(server: Serving, **fields: Any) -> list[PromptLens]:
    body = {"prompt": PROMPT, **fields}
    return LensReply.model_validate(server.json("/lens", body)).prompts


def test_last_layer_equals_probs(server: Serving) -> None:
    (prompt,) = lens(server, top_k=4, tokens=["a", "b"])
    (at,) = prompt.positions
    assert at.position == len(PROMPT) - 1
    assert [layer.layer for layer in at.layers] == [0, 1, 2, 3]
    last = at.layers[-1]
    probs = server.json("/probs", {"prompt": PROMPT, "top_k": 4})["prompts"][0]
    assert [token.id for token in last.top] == [token["id"] for token in probs["tokens"]]
    for mine, theirs in zip(last.top, probs["tokens"], strict=True):
        assert mine.logprob == pytest.approx(theirs["logprob"], rel=1e-6)
        assert mine.rank == theirs["rank"]
        assert mine.text == theirs["text"]
    assert last.entropy == pytest.approx(probs["entropy"], rel=1e-6)
    assert last.divergence == 0
    named = server.json("/probs", {"prompt": PROMPT, "tokens": ["a", "b"]})["prompts"][0]
    assert [token.rank for token in last.tokens] == [token["rank"] for token in named["tokens"]]
    assert at.layers[0].divergence > 0


def test_earlier_layer_equals_the_head_on_its_residual_stream(server: Serving) -> None:
    """The expected logits come from an intervention that copies the layer's output to the last
    layer's output."""
    (prompt,) = lens(server, layers=[1], positions=[-1], top_k=2)
    body = {"prompt": PROMPT, "layers": [1], "positions": [-1]}
    stream = server.json("/hidden_states", body)["prompts"][0]["hidden_states"][0][0]
    change = {"stage": "blocks.2.output", "positions": [-1], "operation": "set", "values": stream}
    logits = server.json("/logits", {"prompt": PROMPT, "interventions": [change]})
    row = np.array(logits["prompts"][0]["logits"][0], dtype=np.float32)
    expected = summarize(row, top_k=2).tokens
    (layer,) = prompt.positions[0].layers
    assert [token.id for token in layer.top] == [token.token_id for token in expected]
    assert [token.logprob for token in layer.top] == pytest.approx(
        [token.logprob for token in expected], rel=1e-5
    )


def test_reply_is_written_in_groups_of_layers(server: Serving) -> None:
    """If a position lists many tokens, each piece of the reply has the tokens of only one layer."""
    body = {"prompt": PROMPT, "positions": [-2, -1], "top_k": 200}
    with server.connect() as raw:
        raw.sendall(request_bytes("/lens", body, "Connection: close"))
        chunks = read_chunks(raw)
    prompts = LensReply.model_validate_json(b"".join(chunks)).prompts
    assert [len(at.layers) for at in prompts[0].positions] == [4, 4]
    assert max(chunk.count(b'"logprob"') for chunk in chunks) == 200, "one layer of eight"
    assert prompts == lens(server, positions=[-2, -1], top_k=200)
