"""Tools: with and without streaming, an answer that is a call fits the function's schema."""

import itertools
import json
from typing import Any

import jsonschema
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitd.service.openai.chat_schemas import ChatReply, FunctionDefinition
from logitd.service.openai.tools import GrowingCall, call_schema
from tests.service.serving import TEST_TIMEOUT, Serving, events

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "What is there?"}]
LIST = {
    "name": "list_files",
    "description": "What is in a folder.",
    "parameters": {
        "type": "object",
        "properties": {"folder": {"$ref": "#/$defs/Name"}, "hidden": {"type": "boolean"}},
        "required": ["folder", "hidden"],
        "$defs": {"Name": {"type": "string", "maxLength": 5}},
    },
}
COUNT = {
    "name": "list",
    "parameters": {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"],
    },
}
NOW = {"name": "now"}
TOOLS = [{"type": "function", "function": function} for function in (LIST, COUNT, NOW)]
SCHEMAS = {
    "list_files": LIST["parameters"],
    "list": COUNT["parameters"],
    "now": {"type": "object", "maxProperties": 0},
}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def ask(server: Serving, **fields: Any) -> Any:
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "max_tokens": 200}
    return server.json(PATH, {**body, **fields})


def called(message: dict[str, Any]) -> tuple[str, Any]:
    """The function and the arguments of a message's call. The arguments must fit the function's
    schema."""
    (call,) = message["tool_calls"]
    assert message["content"] is None
    assert (call["type"], call["id"].partition("-")[0]) == ("function", "call")
    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
    jsonschema.validate(arguments, SCHEMAS[name])
    return name, arguments


def joined(chunks: list[Any]) -> dict[str, Any]:
    """A choice joined from the deltas of its chunks."""
    call: dict[str, Any] = {}
    for chunk in chunks:
        for delta in chunk["choices"][0]["delta"].get("tool_calls", []):
            assert delta["index"] == 0
            if "id" in delta:
                assert call == {}, "name and id come first, and once"
                call = {"id": delta["id"], **delta["function"]}
            else:
                assert set(delta) == {"index", "function"}
                call["arguments"] += delta["function"]["arguments"]
    assert chunks[0]["choices"][0]["delta"]["content"] is None
    return {**call, "finish_reason": chunks[-1]["choices"][0]["finish_reason"]}


def test_required_function_is_called(chatter: Serving) -> None:
    for seed in range(4):
        for name in SCHEMAS:
            reply = ask(chatter, tool_choice=named(name), seed=seed)
            ChatReply.model_validate(reply)
            (choice,) = reply["choices"]
            assert called(choice["message"])[0] == name
            assert choice["finish_reason"] == "tool_calls"


def test_one_of_the_functions_is_called(chatter: Serving) -> None:
    """The model samples the function's name, so different biases lead to different functions."""
    names = set()
    for letters in ("l_", 'l"', "n"):
        bias = {str(ord(letter)): 20.0 for letter in letters}
        (choice,) = ask(chatter, seed=3, logit_bias=bias, max_tokens=400)["choices"]
        names.add(called(choice["message"])[0])
    assert names == set(SCHEMAS)


@pytest.mark.parametrize("choice", ["required", named("list_files"), named("now")])
def test_stream_adds_up_to_the_reply(chatter: Serving, choice: Any) -> None:
    for seed in range(3):
        whole = ask(chatter, tool_choice=choice, seed=seed)["choices"][0]
        body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "max_tokens": 200}
        response = chatter.post(PATH, {**body, "seed": seed, "stream": True, "logprobs": True})
        streamed = joined(events(response.content))
        (call,) = whole["message"]["tool_calls"]
        assert call["function"] == {key: streamed[key] for key in ("name", "arguments")}
        assert streamed["finish_reason"] == "tool_calls"


def test_cut_call_is_reported(chatter: Serving) -> None:
    (choice,) = ask(chatter, tool_choice=named("list_files"), max_tokens=5)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"fol'
    (choice,) = ask(chatter, max_tokens=5)["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)
    assert "tool_calls" not in choice["message"], "no function was chosen yet"


def test_none_is_an_answer_in_words(chatter: Serving) -> None:
    (choice,) = ask(chatter, tool_choice="none", seed=1, max_tokens=8)["choices"]
    plain = chatter.json(PATH, {"messages": MESSAGES, "seed": 1, "max_tokens": 8})
    assert choice == plain["choices"][0]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"tool_choice": "auto"}, "tool_choice", "Set it to 'required' or to a function"),
        ({"tool_choice": None}, "tool_choice", "the default with tools"),
        ({"tools": None}, "tool_choice", "there are no tools"),
        ({"tool_choice": named("other")}, "tool_choice", "'other', which `tools` does not"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "two functions in tools have the name"),
        ({"stop": "a"}, "stop", "could cut short the call"),
        ({"stop_token_ids": [5]}, "stop_token_ids", "could cut short the call"),
        ({"response_format": {"type": "json_object"}}, "tools", "give one of them"),
        ({"guided_regex": "a"}, "tools", "give one of them"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "pattern"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools", "function"),
        ({"tools": [{"type": "function",
                     "function": {"name": "f", "parameters": {"type": "objekt"}}}]},
         "tools", "Invalid type: objekt"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_wrong_tool_is_refused(
    chatter: Serving, fields: dict[str, Any], param: str, said: str
) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", **fields}
    response = chatter.post(PATH, body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert said in error["message"]
    assert "; tool_choice" not in error["message"]


def test_call_and_its_result_can_be_sent_back(chatter: Serving) -> None:
    """The call and its result become text of the conversation, so that the model sees them."""
    message = ask(chatter, seed=1)["choices"][0]["message"]
    (call,) = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "three files"}
    fields: dict[str, Any] = {"max_tokens": 1}
    told = chatter.json(PATH, {"messages": [*MESSAGES, message, result], **fields})
    function = call["function"]
    text = f'{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}'
    plain = [{"role": "assistant", "content": text}, {"role": "tool", "content": "three files"}]
    as_text = chatter.json(PATH, {"messages": [*MESSAGES, *plain], **fields})
    assert told["usage"]["prompt_tokens"] == as_text["usage"]["prompt_tokens"]


def test_official_client_reads_calls(chatter: Serving) -> None:
    client = openai.OpenAI(base_url=f"{chatter.url}/v1", api_key="x", timeout=TEST_TIMEOUT)
    asked: dict[str, Any] = {
        "model": "chatty", "messages": MESSAGES, "tools": TOOLS, "tool_choice": named("list"),
        "parallel_tool_calls": False, "seed": 2, "max_tokens": 60,
    }  # fmt: skip
    (call,) = client.chat.completions.create(**asked).choices[0].message.tool_calls or []
    assert call.type == "function"
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0].message.tool_calls
    assert final is not None
    assert final[0].function.arguments == call.function.arguments


FUNCTIONS = [FunctionDefinition.model_validate(function) for function in (LIST, COUNT, NOW)]
VALUES = st.recursive(
    st.none() | st.integers() | st.text('}{"a\\', max_size=5),
    lambda inner: st.dictionaries(st.text("a}{", max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(
    st.sampled_from(FUNCTIONS),
    st.dictionaries(st.text("a}", max_size=2), VALUES, max_size=2),
    st.lists(st.integers(0, 200), max_size=12),
    st.booleans(),
)
def test_streamed_call_adds_up_to_its_text(
    function: FunctionDefinition, arguments: dict[str, Any], cuts: list[int], several: bool
) -> None:
    """The text of the call may be split into pieces anywhere."""
    whole = json.dumps(arguments)
    text = f'{{"name": "{function.name}", "arguments": {whole}}}' if several else whole
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    growing = GrowingCall(FUNCTIONS if several else [function])
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    new = [growing.push(piece, reason=None) for piece in pieces]
    parts = [part for part in [*new, growing.push("", reason="stop")] if part is not None]
    assert "".join(part["function"]["arguments"] for part in parts) == whole
    assert [part["function"].get("name") for part in parts if "id" in part] == [function.name]


def test_references_point_to_the_moved_schema() -> None:
    recursive = {
        "type": "object",
        "properties": {
            "more": {"$ref": "#"},
            "a": {"$ref": "#/$defs/a"},
            "b": {"const": {"$ref": "#"}},
        },
        "$defs": {"a": {"type": "null"}},
    }
    both = [
        FunctionDefinition.model_validate({"name": name, "parameters": recursive})
        for name in ("f", "g")
    ]
    schema = call_schema(both)
    jsonschema.validate({"name": "g", "arguments": {"more": {"a": None}}}, schema)
    jsonschema.validate({"name": "f", "arguments": {"b": {"$ref": "#"}}}, schema)
    for wrong in ({"more": {"a": 1}}, {"b": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"name": "g", "arguments": wrong}, schema)


@pytest.mark.parametrize("name", ["default", "const", "enum", "examples", "$ref"])
def test_reference_of_a_property_named_like_a_keyword_is_moved(name: str) -> None:
    """The definition `Color` of the first function was taken for the second function."""
    color = {"enum": ["red", "blue"]}
    first = {
        "type": "object",
        "properties": {name: {"$ref": "#/$defs/Color"}},
        "required": [name],
        "$defs": {"Color": color},
    }
    functions = [
        FunctionDefinition(name="paint", parameters=first),
        FunctionDefinition(name="Color", parameters={"type": "object"}),
    ]
    schema = jsonschema.Draft202012Validator(call_schema(functions))
    assert schema.is_valid({"name": "paint", "arguments": {name: "red"}})
    assert not schema.is_valid({"name": "paint", "arguments": {name: {}}})
