"""POST /lens: what the model would say after each layer, over HTTP."""

from typing import Any

import numpy as np
import pytest

from logitd.model.inference.sampling.distribution import summarise
from logitd.service.schemas.base import ErrorReply
from logitd.service.schemas.lens import LensReply, PromptLens
from tests.service.serving import Serving, read_chunks, request_bytes, serving
from tests.service.spelling import long_prompt

PROMPT = "A prompt of more than thirty-two tokens, to have two blocks"


def lens(server: Serving, **fields: Any) -> list[PromptLens]:
    body = {"prompt": PROMPT, **fields}
    return LensReply.model_validate(server.json("/lens", body)).prompts


def test_the_last_layer_is_what_probs_says(server: Serving) -> None:
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


def test_an_earlier_layer_is_the_head_on_its_stream(server: Serving) -> None:
    """The stream as a layer's own output, put into the last layer by an intervention."""
    (prompt,) = lens(server, layers=[1], positions=[-1], top_k=2)
    body = {"prompt": PROMPT, "layers": [1], "positions": [-1]}
    stream = server.json("/hidden_states", body)["prompts"][0]["hidden_states"][0][0]
    change = {"stage": "blocks.2.output", "positions": [-1], "operation": "set", "values": stream}
    logits = server.json("/logits", {"prompt": PROMPT, "interventions": [change]})
    row = np.array(logits["prompts"][0]["logits"][0], dtype=np.float32)
    expected = summarise(row, top_k=2).tokens
    (layer,) = prompt.positions[0].layers
    assert [token.id for token in layer.top] == [token.token_id for token in expected]
    assert [token.logprob for token in layer.top] == pytest.approx(
        [token.logprob for token in expected], rel=1e-5
    )


def test_many_prompts_and_positions(server: Serving) -> None:
    prompts = lens(server, prompt=[PROMPT, "x"], positions="all", layers=[0, -1], top_k=1)
    assert [len(prompt.positions) for prompt in prompts] == [len(PROMPT), 1]
    assert [len(at.layers) for prompt in prompts for at in prompt.positions] == [2] * 60
    (alone,) = lens(server, prompt="x", positions="all", layers=[0, -1], top_k=1)
    assert prompts[1].positions == alone.positions


def test_the_last_position_of_a_prompt_of_several_chunks(speller: Serving) -> None:
    prompt = long_prompt(1000)
    reply = speller.json("/lens", {"prompt": prompt, "top_k": 2})
    (position,) = LensReply.model_validate(reply).prompts[0].positions
    assert position.position == 999
    expected = speller.json("/probs", {"prompt": prompt, "top_k": 2})["prompts"][0]["tokens"]
    assert [token.id for token in position.layers[-1].top] == [token["id"] for token in expected]


def test_a_reply_is_written_some_layers_at_a_time(server: Serving) -> None:
    """However many tokens a position lists, few of them are made into JSON at once."""
    body = {"prompt": PROMPT, "positions": [-2, -1], "top_k": 200}
    with server.connect() as raw:
        raw.sendall(request_bytes("/lens", body, "Connection: close"))
        chunks = read_chunks(raw)
    prompts = LensReply.model_validate_json(b"".join(chunks)).prompts
    assert [len(at.layers) for at in prompts[0].positions] == [4, 4]
    assert max(chunk.count(b'"logprob"') for chunk in chunks) == 400, "two layers of eight"
    assert prompts == lens(server, positions=[-2, -1], top_k=200)


def test_a_full_queue_is_told_before_a_token_is_encoded(server: Serving) -> None:
    too_many = {"prompt": ["x"] * 65, "tokens": ["ab"]}
    error = ErrorReply.model_validate(server.post("/lens", too_many).json()).error
    assert "--max-sequences" in error.message


def test_more_than_a_reply_may_list_is_refused(server: Serving) -> None:
    with serving(server.served.checkpoint.path, slots=2, max_reply_elements=64 * 100) as small:
        body = {"prompt": PROMPT, "positions": "all", "layers": [0], "top_k": 2}
        response = small.post("/lens", body)
        assert response.status_code == 400
        assert str(2 * len(PROMPT)) in response.text
        assert small.post("/lens", body | {"top_k": 1}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"layers": [4]}, "layers", "4 hidden states"),
        ({"top_k": 300}, "top_k", "top_k is 300"),
        ({"tokens": ["ab"]}, "tokens", "'ab' is 2 tokens"),
        ({"tokens": ["a"], "token_ids": [1]}, None, "give one of them"),
        ({"token_ids": [257]}, "token_ids", "257"),
    ],
)
def test_refusals_name_what_is_wrong(
    server: Serving, fields: dict[str, Any], param: str | None, message: str
) -> None:
    response = server.post("/lens", {"prompt": PROMPT, **fields})
    assert response.status_code == 400, response.text
    error = ErrorReply.model_validate(response.json()).error
    assert message in error.message
    assert error.param == param
