"""Fields of requests, alone and in pairs: each has the same effect together with any other field.

The fields and most of their values are derived from the schemas of the bodies, so a new field is
covered without a change here; VALUES has the values that a schema does not state. For every body:

company   the reply or refusal is the same, to the last bit, alone and alongside other requests
stream    the chunks of a stream, computed alongside other requests, add up to the reply
score     /score returns the logprobs of the generated tokens
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import BaseModel

from logitd.model.operations.all import OPERATIONS
from logitd.model.operations.body import PromptBody, RequestBody
from logitd.service.openai.chat_schemas import ChatReply, ChatRequest
from logitd.service.openai.schemas import CompletionReply, CompletionRequest, unsupported
from tests.model.factories import (
    CHAT_TEMPLATE,
    chat_tokenizer,
    save_tiny_checkpoint,
    tiny_config,
    tiny_gpt,
)
from tests.service.serving import Serving, events, serving
from tests.service.twins import lasting, put_together

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BODIES: dict[str, type[RequestBody]] = {
    **{each.path: each.body for each in OPERATIONS if each.name in ("generate", "probs", "score",
                                                                    "logits")},
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
}  # fmt: skip
REPLIES: dict[str, type[BaseModel]] = {
    **{each.path: each.reply for each in OPERATIONS if each.path in BODIES},
    "/v1/completions": CompletionReply,
    "/v1/chat/completions": ChatReply,
}
SAMPLED = ("/generate", "/v1/completions", "/v1/chat/completions")
PROMPT = "A prompt of more than thirty-two tokens, to have two blocks"
BASE: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": PROMPT, "max_tokens": 6, "seed": 1},
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 6, "seed": 1},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "ab"}], "max_tokens": 6, "seed": 1,
    },
}  # fmt: skip
ABLATE = {"stage": "blocks.0.attention.heads", "heads": [1], "operation": "zero"}
STEER = {"stage": "blocks.*.output", "operation": "scale", "factor": 1.2, "positions": "generated"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g"}},
]
VALUES: dict[str, list[Any]] = {
    "allowed_token_ids": [list(range(97, 123)), [256, 97]],
    "choice": [["path", "osp", "p"]],
    "continuations": [["cd", [200, 201]], ["x" * 40]],
    "grammar": ['start: "a" | "b" start'],
    "interventions": [[ABLATE], [ABLATE, STEER]],
    "json_schema": [SCHEMA],
    "logit_bias": [{"97": 9.5, "200": -3}],
    "max_completion_tokens": [1, 20],
    "metadata": [{"a": "b"}],
    "max_tokens": [1, 20],
    "messages": [
        [{"role": "user", "content": "€"}, {"role": "assistant", "content": " and "}],
        [{"role": "system", "content": [{"type": "text", "text": "x"}]}],
    ],
    "min_tokens": [3, 6],
    "model": ["pairs"],
    "n": [2, 3],
    "processing": [
        {"temperature": 0.6, "top_p": 0.9},
        {"presence_penalty": 1.5, "completion_start": 20, "logit_bias": {"97": 3}},
    ],
    "prompt": [[PROMPT, "x", [255, 195]], [200, 201, 226]],
    "regex": ["[a-c]{2,9}d"],
    "repetition_penalty": [0.8, 1.4],
    "response_format": [
        {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    ],
    "seed": [0, 7],
    "stop": ["b", ["\ufffd", "aa", "a"]],
    "stop_token_ids": [[98, 200]],
    "stream_options": [{"include_usage": True}, {"continuous_usage_stats": True}],
    "structured_outputs": [{"regex": "[ab]+"}, {"json": SCHEMA}],
    "temperature": [0, 0.3],
    "timeout": [60],
    "tokens": [["a", "é"[:1], "<|endoftext|>"]],
    "tool_choice": ["none", "required"],
    "tools": [TOOLS, TOOLS[:1]],
    "guided_choice": [["path", "p"]],
    "guided_grammar": ['start: "a" | "b" start'],
    "guided_json": [SCHEMA],
    "guided_regex": ["[a-c]{2,9}d"],
}  # fmt: skip
"""Values of fields whose schema states none, or only trivial ones."""


def from_schema(schema: dict[str, Any], definitions: dict[str, Any]) -> list[Any]:
    """Up to two values that a JSON schema allows, except None."""
    if "$ref" in schema:
        return from_schema(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    for several in ("anyOf", "oneOf"):
        if several in schema:
            found = [value for one in schema[several] for value in from_schema(one, definitions)]
            return found[:2]
    if "enum" in schema or "const" in schema:
        return list(schema.get("enum", [schema.get("const")]))[:2]
    lowest = schema.get("minimum", schema.get("exclusiveMinimum", 0))
    match schema.get("type"):
        case "boolean":
            return [True, False]
        case "integer":
            return [lowest, lowest + 3]
        case "number":
            return [lowest + 0.25, lowest + 0.75]
        case "string":
            return ["a"]
        case "array":
            return [[value] for value in from_schema(schema["items"], definitions)]
    return []


def values_of(path: str) -> dict[str, list[Any]]:
    """The values of each supported field."""
    schema = BODIES[path].model_json_schema()
    return {
        name: VALUES.get(name) or from_schema(field, schema.get("$defs", {}))
        for name, field in schema["properties"].items()
        if name != "stream" and field.get("description") != unsupported().description
    }


VALUES_OF = {path: values_of(path) for path in BODIES}


def bodies(path: str, name: str) -> list[dict[str, Any]]:
    """Bodies with each value of a field: first the value alone, then together with one value of
    each later field. With two values per field, a pair of fields takes two bodies instead of four,
    and each value of both fields still occurs."""
    base, values = BASE.get(path, {"prompt": PROMPT}), VALUES_OF[path]
    assert values[name], f"VALUES has none for {name}, and its schema states none"
    fields = list(values)
    later = fields[fields.index(name) + 1 :]
    alone = [{**base, name: value} for value in values[name]]
    return alone + [
        {**body, other: values[other][(place + turn) % len(values[other])]}
        for turn, body in enumerate(alone)
        for place, other in enumerate(later)
    ]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    path = tmp_path_factory.mktemp("checkpoints") / "pairs"
    save_tiny_checkpoint(
        path,
        gpt=tiny_gpt(tiny_config(vocab_size=259, context_length=256)),
        tokenizer=chat_tokenizer(),
        chat_template=CHAT_TEMPLATE,
    )
    with serving(path, slots=6, max_queue=4096) as running:
        yield running


def answer(server: Serving, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Status and reply, without the parts that differ each time."""
    response = server.post(path, body)
    if response.status_code == 200:
        REPLIES[path].model_validate(response.json())
    return response.status_code, without_chance(response.json())


def without_chance(reply: dict[str, Any]) -> dict[str, Any]:
    """A reply without times, random ids and counts of cached tokens."""
    kept = lasting(reply)
    for name in ("cached_tokens", "prompt_tokens_details"):
        kept.get("usage", {}).pop(name, None)
    for choice in kept.get("choices", ()):
        for call in choice.get("message", {}).get("tool_calls", ()):
            del call["id"]
    return kept


def streamed(server: Serving, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Status and joined choices of a stream."""
    response = server.post(path, {**body, "stream": True})
    if response.status_code != 200:
        return response.status_code, without_chance(response.json())
    chunks = events(response.content)
    if "error" in chunks[-1]:
        return 400, chunks[-1]
    return 200, grown(chunks)


def grown(chunks: Sequence[Any]) -> Any:
    """Choices and prompts joined from chunks; a reply that was not streamed counts as one chunk."""
    for chunk in chunks:
        for choice in chunk["choices"]:
            choice |= choice.pop("delta", None) or choice.pop("message", None) or {}
            for call in choice.pop("tool_calls", ()):
                function = call["function"]
                choice |= {"name": function.get("name"), "arguments": function["arguments"]}
    whole = put_together(list(chunks))
    for choice in whole["choices"].values():
        if choice.get("logprobs") and not any(choice["logprobs"].values()):
            choice["logprobs"] = None  # without tokens a stream has no logprobs field
    found = {"choices": whole["choices"]}
    if whole.get("prompts"):
        found["prompts"] = whole["prompts"]
    return found


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, values in VALUES_OF.items() for name in values]
)
def test_fields_hold_alone_in_company_and_as_a_stream(
    server: Serving, path: str, name: str
) -> None:
    asked = bodies(path, name)
    alone = [answer(server, path, body) for body in asked]
    ask = streamed if path in SAMPLED else answer
    with ThreadPoolExecutor(8) as pool:
        company = list(pool.map(lambda body: ask(server, path, body), asked))
    for body, (status, reply), found in zip(asked, alone, company, strict=True):
        if status != 200:
            assert found[0] == status, body
            assert found[1]["error"] == reply["error"], body
        else:
            assert found == (200, grown([reply]) if path in SAMPLED else reply), body


@pytest.mark.parametrize("name", VALUES_OF["/generate"])
def test_score_gives_the_logprobs_of_what_was_generated(server: Serving, name: str) -> None:
    for asked in bodies("/generate", name):
        if asked.get("echo") or asked.get("logprobs_stage") == "processed":
            continue
        status, reply = answer(server, "/generate", {**asked, "logprobs": 0})
        if status == 200:
            prompts = PromptBody(prompt=asked["prompt"]).prompts
            for index, prompt in enumerate(prompts):
                choices = [one for one in reply["choices"] if one["prompt_index"] == index]
                check_scores(server, prompt, choices, asked.get("interventions", []))


def check_scores(
    server: Serving, prompt: Any, choices: Sequence[Any], interventions: Sequence[Any]
) -> None:
    """Compare the logprobs of choices with the logprobs of /score, up to rounding: plain torch
    computes a generated token in a single row, but a given token in a block of rows."""
    choices = [choice for choice in choices if choice["token_ids"]]
    if not choices:
        return
    continuations = [choice["token_ids"] for choice in choices]
    body = {"prompt": prompt, "continuations": continuations, "interventions": interventions}
    (scored,) = server.json("/score", {**body, "logprobs": 0})["prompts"]
    for choice, score in zip(choices, scored["continuations"], strict=True):
        own = [token["logprob"] for token in choice["tokens"]]
        assert [token["logprob"] for token in score["tokens"]] == pytest.approx(own, abs=1e-4)
