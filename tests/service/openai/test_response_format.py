"""`response_format` as the official client sends it: the text is JSON that fits the schema."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.service.http.test_generate_constraints import DEAD_END
from tests.service.serving import Serving, error_of, events

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 22, 333]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
MESSAGES: Any = [{"role": "user", "content": "Well?"}]


@pytest.fixture
def client(chatter: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{chatter.url}/v1", api_key="x") as made:
        yield made


def fits(text: str | None) -> bool:
    jsonschema.validate(json.loads(text or ""), SCHEMA)
    return True


def test_answers_fit_the_schema(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="chatty", messages=MESSAGES, response_format=FORMAT, n=6, seed=1, temperature=2
    )
    assert [choice.finish_reason for choice in reply.choices] == ["stop"] * 6
    assert all(fits(choice.message.content) for choice in reply.choices)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_schema_that_does_not_compile_names_the_clients_field(chatter: Serving, path: str) -> None:
    asked = {"prompt": "x"} if path == "/v1/completions" else {"messages": MESSAGES}
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "integr"}}}
    response = chatter.post(path, {**asked, "response_format": form})
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error.param == "response_format"
    assert error.message.startswith("response_format: ")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_dead_end_while_generating_names_the_clients_field(chatter: Serving, path: str) -> None:
    prompt: Any = {"prompt": "x"} if path == "/v1/completions" else {"messages": MESSAGES}
    body = {**prompt, "max_tokens": 50}
    error = chatter.refused(path, {**body, "guided_grammar": DEAD_END})
    assert (error.param, error.code) == ("guided_grammar", "constraint_failed")
    assert error.message.startswith("guided_grammar: ")
    stream = chatter.post(path, {**body, "guided_grammar": DEAD_END, "stream": True})
    assert events(stream.content)[-1]["error"]["param"] == "guided_grammar"
