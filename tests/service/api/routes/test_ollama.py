"""Ollama's endpoints: what they answer is what /generate computes, in Ollama's shape."""

import json
from typing import Any

import pytest

from logitd.service.api.ollama.formats import LINES
from logitd.service.core.errors import bad_request
from logitd.service.schemas.ollama import (
    OllamaChatReply,
    OllamaGenerateReply,
    OllamaModels,
    OllamaShowReply,
)
from tests.service.serving import Serving

PROMPT = "What is é?"
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 5}
MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why?"}]


def name(server: Serving) -> str:
    return server.served.checkpoint.name


def ask(server: Serving, path: str = "/api/generate", **fields: Any) -> Any:
    reply = server.json(path, {"model": name(server), "stream": False, **fields})
    form = OllamaChatReply if path == "/api/chat" else OllamaGenerateReply
    form.model_validate(reply)
    return reply


def lines(server: Serving, path: str = "/api/generate", **fields: Any) -> list[Any]:
    """The pieces of a stream, which is what a body without `stream` asks for."""
    response = server.post(path, {"model": name(server), **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def test_the_text_is_that_of_generate(server: Serving) -> None:
    native = server.generate(PROMPT, max_tokens=12, **SAMPLED)
    reply = ask(server, prompt=PROMPT, options={"num_predict": 12, **SAMPLED})
    assert reply["response"] == native["choices"][0]["text"]
    assert (reply["done"], reply["done_reason"], reply["model"]) == (True, "length", name(server))
    counts = native["usage"]
    assert reply["prompt_eval_count"] == counts["prompt_tokens"]
    assert reply["eval_count"] == counts["completion_tokens"]
    assert reply["total_duration"] >= reply["prompt_eval_duration"] + reply["eval_duration"] > 0


def test_what_is_not_said_is_as_ollama_has_it(server: Serving) -> None:
    said = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 7}
    native = server.generate(PROMPT, max_tokens=12, **said)["choices"][0]["text"]
    for options in ({"seed": 7}, {"seed": 7, "top_k": 40}, {"seed": 7, "top_p": None}):
        reply = ask(server, prompt=PROMPT, options={"num_predict": 12, **options})
        assert reply["response"] == native
    whole = ask(server, prompt=PROMPT, options={"seed": 7, "num_predict": -1})
    assert whole["prompt_eval_count"] + whole["eval_count"] <= server.served.context_length


@pytest.mark.parametrize("seed", range(4))
def test_the_pieces_of_a_stream_are_the_text(server: Serving, seed: int) -> None:
    options = {"num_predict": 20, "seed": seed, "temperature": 1.5}
    pieces = lines(server, prompt=PROMPT, options=options)
    for piece in pieces:
        OllamaGenerateReply.model_validate(piece)
    whole = ask(server, prompt=PROMPT, options=options)
    assert "".join(piece["response"] for piece in pieces) == whole["response"]
    assert [piece["done"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    for key in ("done_reason", "eval_count", "prompt_eval_count"):
        assert pieces[-1][key] == whole[key]


def test_a_stop_text_ends_it(speller: Serving) -> None:
    reply = ask(speller, prompt="a", options={"stop": ["g"], "temperature": 0})
    assert (reply["response"], reply["done_reason"]) == ("bcdef", "stop")


def test_without_a_prompt_it_says_that_the_model_is_there(server: Serving) -> None:
    assert ask(server)["done_reason"] == ask(server, prompt="")["done_reason"] == "load"
    (line,) = lines(server)
    assert (line["response"], line["done"]) == ("", True)


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        ({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
         [{"a": True}, {"a": False}]),
        ({"enum": [1, 2]}, [1, 2]),
    ],
)  # fmt: skip
def test_a_format_is_a_constraint(server: Serving, form: Any, texts: list[Any]) -> None:
    assert json.loads(ask(server, prompt="a", format=form)["response"]) in texts


def test_any_object_of_json(server: Serving) -> None:
    reply = ask(server, prompt="a", format="json", options={"num_predict": 3, "seed": 1})
    assert reply["response"].lstrip().startswith("{")


@pytest.mark.parametrize("tag", ["", ":latest"])
def test_a_conversation_is_that_of_chat_completions(chatter: Serving, tag: str) -> None:
    own = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 3}
    body = {"messages": MESSAGES, "max_completion_tokens": 12, **own}
    answer = chatter.json("/v1/chat/completions", body)["choices"][0]["message"]
    fields: dict[str, Any] = {
        "model": name(chatter) + tag,
        "options": {"num_predict": 12, "seed": 3},
    }
    reply = ask(chatter, "/api/chat", messages=MESSAGES, **fields)
    assert reply["message"] == {"role": "assistant", "content": answer["content"]}
    pieces = lines(chatter, "/api/chat", messages=MESSAGES, **fields)
    assert "".join(piece["message"]["content"] for piece in pieces) == answer["content"]
    # Where there is a template, a prompt is a message.
    generated = ask(chatter, prompt="Why?", system="Be short.", **fields)
    assert generated["response"] == answer["content"]
    raw = ask(chatter, prompt="Why?", raw=True, **fields)
    native = chatter.generate("Why?", max_tokens=12, **own)["choices"][0]["text"]
    assert raw["response"] == native


def test_what_there_is(server: Serving) -> None:
    for path in ("/api/tags", "/api/ps"):
        reply = server.client.get(path).json()
        (model,) = OllamaModels.model_validate(reply).models
        assert model.name == model.model == name(server)
        assert model.size > 1000
        assert model.digest == server.served.checkpoint.weights_sha256
    shown = server.json("/api/show", {"model": name(server)})
    OllamaShowReply.model_validate(shown)
    info = shown["model_info"]
    assert info["gpt.context_length"] == server.served.context_length
    assert info["general.parameter_count"] == server.served.computation.parameters
    version = server.client.get("/api/version").json()
    assert version == {"version": server.client.get("/version").json()["version"]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "a", "options": {"num_ctx": 10**6}}, "options"),
        ({"prompt": "a", "options": {"temperature": -1}}, "options"),
        ({"prompt": "a", "options": {"mirostat": 1}}, "options"),
        ({"prompt": "a", "options": {"num_gpu": 1}}, "options"),
        ({"prompt": "a", "options": {"num_predict": 1000}}, "prompt"),
        ({"prompt": "a", "options": {"num_predict": 0}}, "options"),
        ({"prompt": "a", "keep_alive": 0}, "keep_alive"),
        ({"prompt": "a", "images": ["x"]}, "images"),
        ({"prompt": "a", "system": "b"}, "system"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "format": "yaml"}, "format"),
        ({"prompt": "a", "format": {"type": "x"}}, "format"),
        ({"prompt": "a" * 5000}, "prompt"),
        ({"prompt": "a", "think": True}, "think"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_be_done_is_refused(
    server: Serving, fields: dict[str, Any], param: str
) -> None:
    response = server.post("/api/generate", {"model": name(server), **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_what_asks_for_nothing_is_taken(server: Serving) -> None:
    """What Ollama's own clients send with every request."""
    fields: dict[str, Any] = {
        "template": "", "context": [], "images": [], "format": "", "suffix": "",
        "keep_alive": "5m", "think": False, "raw": False, "logprobs": None,
    }  # fmt: skip
    options = {"num_predict": 4, "num_ctx": 8, "seed": -1, "typical_p": 1.0, "num_gpu": None}
    assert ask(server, prompt="a", options=options, **fields)["eval_count"] <= 4


def test_another_model_is_not_here(server: Serving) -> None:
    for path in ("/api/generate", "/api/show"):
        response = server.post(path, {"model": "llama3.2"})
        assert response.status_code == 404, response.text
    chat = server.post("/api/chat", {"model": name(server), "messages": MESSAGES})
    assert chat.status_code == 400
    assert chat.json()["error"]["code"] == "no_chat_template"


def test_an_error_in_a_stream_is_told_as_ollama_tells_it() -> None:
    told = LINES.part(LINES.error(bad_request("too much", "prompt")))
    assert told == b'{"error":"too much"}\n'
