"""POST /generate with a constraint: texts match it, also in streams and alongside other requests,
and every refusal has its message."""

import json
import re
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from logitd.model.inference.constraints.compiler import Compiler, Source
from logitd.model.inference.constraints.sandbox import Sandbox
from logitd.model.inference.reference import generate
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.transformer.gpt import GPT
from logitd.service.application import lifespan
from tests.model.factories import byte_tokenizer
from tests.model.inference.constraints.test_sandbox import HOSTILE, ROOM, SLOW
from tests.service.serving import Serving, error_of, events, eventually, request_bytes, serving
from tests.service.spelling import END_OF_TEXT_ID

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "b": {"enum": ["é", 1]},
        "a": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["b", "a"],
    "additionalProperties": False,
}
LARK = 'start: PAIR ("," PAIR){0,2}\nPAIR: /[a-c]=[0-9]{1,2}/'
CONSTRAINTS: dict[str, Any] = {
    "regex": "(?:ab|[0-9]é){2,5}",
    "json_schema": SCHEMA,
    "choice": ["yes", "no", "perhaps"],
    "grammar": LARK,
}


def matches(kind: str, text: str) -> bool:
    match kind:
        case "regex":
            return re.fullmatch(CONSTRAINTS["regex"], text) is not None
        case "json_schema":
            jsonschema.validate(json.loads(text), SCHEMA)
            return re.match(r'{"b": (1|"é"), "a": \[', text) is not None
        case "choice":
            return text in CONSTRAINTS["choice"]
    return re.fullmatch("[a-c]=[0-9]{1,2}(,[a-c]=[0-9]{1,2}){0,2}", text) is not None


def source(kind: str) -> Source:
    given = CONSTRAINTS[kind]
    return Source(kind, given if isinstance(given, str) else json.dumps(given))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_every_text_matches(server: Serving, kind: str) -> None:
    reply = server.generate(
        ["A prompt", "x"], n=8, temperature=3, seed=1, **{kind: CONSTRAINTS[kind]}
    )
    for choice in reply["choices"]:
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] in (None, END_OF_TEXT_ID)
        assert matches(kind, choice["text"]), choice["text"]
    assert len({choice["text"] for choice in reply["choices"]}) > 1


@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_tokens_and_logprobs_are_the_references(server: Serving, gpt: GPT, kind: str) -> None:
    constraint = Compiler(byte_tokenizer()).compile(source(kind))
    params = SamplingParams(
        max_tokens=30,
        seed=5,
        temperature=2,
        top_p=0.9,
        constraint=constraint,
        stop_token_ids=frozenset({END_OF_TEXT_ID}),
    )
    (choice,) = server.generate(
        "A prompt", seed=5, temperature=2, top_p=0.9, max_tokens=30, logprobs=300 - 43,
        logprobs_stage="processed", **{kind: CONSTRAINTS[kind]},
    )["choices"]  # fmt: skip
    assert choice["token_ids"] == generate(gpt, list(b"A prompt"), params)
    matcher = constraint.matcher()
    for token in choice["tokens"]:
        listed = {one["id"] for one in token["top"]}
        assert listed <= set(matcher.allowed().nonzero()[0].tolist())
        matcher.advance(token["id"])


def test_max_tokens_may_cut_it_short(server: Serving) -> None:
    (choice,) = server.generate("x", regex="[ab]{20}", max_tokens=7)["choices"]
    assert choice["finish_reason"] == "length"
    assert re.fullmatch("[ab]{7}", choice["text"])


def test_stop_strings_and_tokens_end_it_earlier(server: Serving) -> None:
    (choice,) = server.generate("x", regex="[a-c]{10}-[a-c]{10}", stop="-")["choices"]
    assert re.fullmatch("[a-c]{10}", choice["text"])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "-")
    (choice,) = server.generate("x", regex="a{9}ba{9}", stop_token_ids=[ord("b")])["choices"]
    assert choice["text"] == "a" * 9
    assert choice["stop_reason"] == ord("b")


# Refusals

REFUSED: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "two": ({"regex": "a", "choice": ["a"]}, "regex", "regex and choice are alternatives"),
    "all": (CONSTRAINTS, "regex", "regex and json_schema and choice and grammar are alternatives"),
    "allowed_token_ids": (
        {"regex": "a", "allowed_token_ids": [97]},
        "allowed_token_ids",
        "allowed_token_ids and regex together could forbid every token",
    ),
    "empty regex": ({"regex": ""}, "regex", "only the empty text"),
    "bad schema": ({"json_schema": {"type": 5}}, "json_schema", "json_schema: "),
    "a list": ({"json_schema": []}, "json_schema", "json_schema"),
    "text": ({"json_schema": "{}"}, "json_schema", "json_schema"),
    "an empty choice": ({"choice": ["a", ""]}, "choice", "choice[1] must have at least 1"),
    "twice": ({"choice": ["a", "b", "a"]}, "choice", "choice lists a text twice"),
    "numbers": ({"choice": [1, 2]}, "choice", "choice"),
    "many": ({"choice": [str(i) for i in range(1025)]}, "choice", "at most 1024 items, not 1025"),
    "long choices": ({"choice": ["a" * 2**15, "b"]}, "choice", "32769 characters in total"),
    "a long regex": ({"regex": "a" * (2**15 + 1)}, "regex", "32768"),
    "a long grammar": ({"grammar": " " * (2**15 + 1)}, "grammar", "32768"),
    "a long schema": ({"json_schema": {"title": "a" * 2**15}}, "json_schema", "the limit is 32768"),
    "too large": ({"json_schema": {"maximum": float("1e308"), "x": 1}}, "json_schema", "'x'"),
    **{
        name: (
            {one.kind: one.text if one.kind != "json_schema" else json.loads(one.text)},
            one.kind,
            f"{one.kind}: the constraint is too large or too deeply nested",
        )
        for name, one in HOSTILE.items()
        if len(one.text) < 2**15
    },
}


DEAD_END = 'start: B (A | C)\nB: /b{40}/\nA: /a/ & /b/\nC: "c" & "d"'
"""A grammar that no text matches."""


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_constraint_is_refused(server: Serving, name: str) -> None:
    fields, param, words = REFUSED[name]
    error = server.refused("/generate", {"prompt": "x", "max_tokens": 4, **fields})
    assert error.param == param
    assert words in error.message
    assert server.generate("x", max_tokens=1)


def test_dead_end_of_a_constraint_is_reported(server: Serving) -> None:
    """The constraint compiles, because the trial compilation does not reach its dead end."""
    error = server.refused("/generate", {"prompt": "x", "grammar": DEAD_END})
    assert (error.param, error.code) == ("grammar", "constraint_failed")
    assert error.message == "grammar: no text matches from here on"
    chunks = events(
        server.post("/generate", {"prompt": "x", "grammar": DEAD_END, "stream": True}).content
    )
    assert chunks[-1]["error"]["code"] == "constraint_failed"
    server.wait_idle()


# Time


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services whose sandboxes have enough memory for a slow source."""
    monkeypatch.setattr(lifespan, "Sandbox", partial(Sandbox, memory=ROOM))


@pytest.fixture
def hasty(checkpoint_path: Path, roomy: None) -> Iterator[Serving]:
    """A service that limits compilation to half a second."""
    with serving(checkpoint_path, slots=2, constraint_timeout=0.5) as running:
        running.generate("x", regex="a", max_tokens=1)  # the process has started
        yield running


SLOW_BODY = {"prompt": "x", "max_tokens": 2, "json_schema": json.loads(SLOW.text)}


def test_slow_compilation_is_refused_without_delaying_others(hasty: Serving) -> None:
    answers: list[Any] = []
    slow = threading.Thread(target=lambda: answers.append(hasty.post("/generate", SLOW_BODY)))
    slow.start()
    asked = 0
    while slow.is_alive():
        assert hasty.generate("x", max_tokens=2)
        asked += 1
        slow.join(0.02)
    error = error_of(answers[0])
    assert "more than 0.5 s to compile" in error.message
    assert asked > 3, "the event loop or the engine was blocked"
    assert hasty.sample("logitd_constraints_total", outcome="timed_out") == 1
    assert hasty.generate("x", regex="ab", max_tokens=5)["choices"][0]["text"] == "ab"


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize("streamed", [False, True])
def test_client_may_disconnect_during_compilation(checkpoint_path: Path, streamed: bool) -> None:
    with serving(checkpoint_path, slots=2, constraint_timeout=3) as server:
        server.generate("x", regex="a", max_tokens=1)
        raw = server.connect()
        raw.sendall(request_bytes("/generate", SLOW_BODY | {"stream": streamed}))
        eventually(lambda: bool(server.served.constraints._compiling))
        raw.close()
        gone = {"endpoint": "/generate", "status": "499"}
        eventually(lambda: server.sample("logitd_http_requests_total", **gone) == 1)
        assert server.served.engine.admission.sequences == 0
        assert server.generate("x", max_tokens=2)["choices"]
        eventually(lambda: not server.served.constraints._compiling)
        server.wait_idle()


def test_timeout_counts_the_compilation(server: Serving) -> None:
    fields = {"prompt": "x", "timeout": 1e-9, "regex": "[a-z]{3}[0-9]{4}"}
    error = server.refused("/generate", fields, 504)
    assert error.code == "deadline_exceeded"


def test_timeout_ends_the_compilation(hasty: Serving) -> None:
    """Otherwise the compilation would end later, with a 400."""
    error = hasty.refused("/generate", SLOW_BODY | {"timeout": 0.05}, 504)
    assert error.code == "deadline_exceeded"
    eventually(lambda: not hasty.served.constraints._compiling)
    hasty.wait_idle()


def test_missing_llguidance_is_refused_with_the_install_command(
    checkpoint_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with serving(checkpoint_path) as server:
        for kind, given in CONSTRAINTS.items():
            error = server.refused("/generate", {"prompt": "x", kind: given})
            assert error.param == kind
            assert "pip install llguidance" in error.message
        assert server.generate("x", max_tokens=2)["choices"]


def test_sandbox_process_ends_with_the_service(checkpoint_path: Path) -> None:
    with serving(checkpoint_path) as server:
        server.generate("x", regex="a", max_tokens=1)
        process = server.served.constraints._sandbox._process
        assert process is not None
        assert process.poll() is None
    assert process.returncode is not None
