"""Wrong fields of operations: refused by name, with the same message over HTTP and in process."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from logitd.model.inference.errors import InvalidRequest
from logitd.model.llm import LLM, GenerationError
from logitd.model.operations.operation import Operation
from logitd.model.operations.validation import parse
from logitd.service.http.schemas import ErrorDetail
from tests.profiles import examples
from tests.service.http.asking import ABLATE, BY_NAME, NPY, PROMPT, SMALLEST
from tests.service.serving import Serving, error_of, events

OTHER = "Another text, as long as the first, which has fifty-nine by"
PATCH = {"stage": "blocks.*.output", "operation": "set", "from": {"prompt": OTHER}}
PATH: dict[str, Any] = {"methods": ["integrated_gradients"]}
ZERO = {"stage": "embedding", "operation": "zero"}
SET = {"stage": "embedding", "operation": "set"}
PROCESSED = {"stage": "processed"}
VARIED: dict[str, Any] = {"vary": ABLATE, "over": ["layers"]}

Row = tuple[dict[str, Any], str | None, str]
"""Fields to add to SMALLEST's, the field that the error names, and part of the message."""

NO_TEXTS: tuple[Any, ...] = (
    [], [1, 2], [[1]], ["a", 1], ["a", ["b"]], 5, None, True, {}, ["a"] * 4097, [None],
)  # fmt: skip
NO_IDS: tuple[Any, ...] = (
    "a", None, 5, ["a"], [1.5], [True], [-1], [[-1]], [2**31], [1, [1]], [[[1]]], {},
)  # fmt: skip
EMPTY: tuple[Any, ...] = ("", [], [""], [[]], ["a", ""], ["a", []], [[1], []])

PROMPTS: list[Row] = [
    *(
        ({"prompt": prompt}, "prompt", "the prompt is empty; give at least one token")
        for prompt in EMPTY
    ),
    *(
        ({"prompt": prompt}, "prompt", "context is 128")
        for prompt in ("x" * 129, "x" * 4_000_000, "é" * 65, [1] * 129, [1] * 100_000,
                       ["a", "x" * 129], [[1], [2] * 129])
    ),
    *(
        ({"prompt": prompt}, "prompt", "vocabulary of 257 ids (0 to 256)")
        for prompt in ([257], [0, 2**31 - 1], [[1], [300]], ["a", [257]])
    ),
    ({"prompt": None}, "prompt", "must be a string, a list of token ids"),
    ({"max_new_tokens": 5}, "max_new_tokens", "unknown field"),
]  # fmt: skip
"""Rows for every operation on one or many prompts."""
POSITIONS: list[Row] = [
    *(
        ({"positions": positions}, "positions", said)
        for positions, said in (
            ([2, 1], "ascending and distinct"), ([1, 1], "ascending and distinct"),
            ([1, -58], "ascending and distinct"), ([59], "59 tokens"), ([-60], "-60"),
            ({"from": 59}, "no positions from 59 to the end"),
            ({"to": 0}, "no positions from 0 to 0"),
            ({"from": 5, "to": 5}, "no positions from 5 to 5"),
            *((wrong, "positions must be 'last', 'all', a list of integers")
              for wrong in ([], {}, {"start": 5}, {"from": 5, "step": 2}, "first", 0, [0.5], None)),
        )
    ),
]  # fmt: skip
"""Rows for every operation that chooses positions."""
ARRAYS: list[Row] = [({"dtype": "int8"}, "dtype", "'float32', 'float16' or 'bfloat16'")]
INTERVENTIONS: list[Row] = [
    ({"stage": "logits", "operation": "zero"}, "interventions", "use logit_bias"),
    ({"stage": "blocks.0.attention.head_out", "operation": "zero"}, "interventions",
     "use attention.heads"),
    ({"stage": "blocks.9.output", "operation": "zero"}, "interventions", "'blocks.9.output'"),
    ({"stage": "embedding", "operation": "scale"}, "interventions", "'scale' needs a factor"),
    ({**ZERO, "factor": 2}, "interventions", "'zero' takes no factor"),
    ({"stage": "embedding", "operation": "add"}, "interventions", "'values' and 'from'"),
    ({**SET, "values": [1.0, 2.0]}, "interventions", "shape [1, 2], but embedding needs [1, 32]"),
    ({**SET, "values": [[1.0], [1.0, 2.0]]}, "interventions", "have different lengths"),
    ({**SET, "operation": "add", "values": [1e300] * 32}, "interventions", "3.4e38"),
    ({**SET, "values": "a"}, "interventions", ".values must be a list of"),
    ({**ZERO, "positions": "x"}, "interventions", ".positions must be 'all'"),
    ({**ZERO, "positions": []}, "interventions", "a list of integers (1 to"),
    ({**ZERO, "heads": [0]}, "interventions", "no heads"),
    ({"stage": "blocks.0.attention.v", "operation": "zero", "heads": [4]}, "interventions",
     "blocks.0.attention.v has 4 heads"),
    ({**ZERO, "positions": [59]}, "interventions", "59 tokens"),
    ({**ZERO, "positions": "generated"}, "interventions", "generates no tokens"),
    ({**SET, "from": {"prompt": "x", "positions": [1]}}, "interventions", "1 token "),
    ({**SET, "from": {"prompt": "abc"}}, "interventions", "3 positions, but the prompt has 59"),
    ({**ZERO, "units": [32]}, "interventions", "units has 32, but embedding has 32 units (0 to 31"),
    ({**ZERO, "units": [0], "along": [1.0] * 32}, "interventions", "are alternatives"),
    ({**SET, "units": [0, 3], "values": [1.0]}, "interventions", "embedding needs [1, 2]"),
    ({**SET, "along": [1.0] * 32, "values": [1.0] * 32}, "interventions", "needs [1, 1]"),
    ({**ZERO, "along": [1.0] * 31}, "interventions", "along has the shape [31]"),
    ({**ZERO, "along": [0.0] * 32}, "interventions", "along has a norm of"),
    ({**ZERO, "along": {"from": {"prompt": "a"}, "minus": {"prompt": "a"}}}, "interventions",
     "along has a norm of"),
    ({**SET, "along": [1.0] * 31, "from": {"prompt": "a"}}, "interventions", "shape [31]"),
    ({**SET, "along": [0.0] * 32, "from": {"prompt": "a"}}, "interventions", "along has a norm of"),
    ({**ZERO, "along": {"from": {"prompt": "a" * 999}}}, "interventions", "interventions[1]: "),
    ({**ZERO, "along": "x"}, "interventions", "along must be a list of numbers"),
    ({**ZERO, "stage": "blocks.0.attention.probs", "along": [1.0]}, "interventions", "units"),
    ({**ZERO, "proportional_to": [1.0] * 32}, "interventions", "'zero' takes no proportional_to"),
    ({**ZERO, "operation": "clamp"}, "interventions", "minimum, maximum or both"),
    ({**ZERO, "operation": "clamp", "minimum": 2, "maximum": 1}, "interventions", "above maximum"),
    ({**SET, "from": {"prompt": ""}}, "interventions",
     "'from' or 'minus' cannot be computed: the prompt is empty"),
]  # fmt: skip
"""Interventions that cannot be carried out."""
EVERY_LAYER = {"stage": "blocks.*.output", "operation": "scale", "factor": 1.0}

REFUSED: dict[str, list[Row]] = {
    "generate": [
        *PROMPTS,
        ({"prompt": "x" * 128, "max_tokens": None}, "prompt", "Shorten the prompt by 1 token"),
        ({"prompt": "x" * 100, "max_tokens": 29}, "prompt", "lower max_tokens to 28"),
        ({"prompt": "x" * 3, "max_tokens": 200}, "max_tokens", "128. Lower max_tokens to 125"),
        ({"stop_token_ids": [257]}, "stop_token_ids", "257"),
        ({"allowed_token_ids": [0, 999]}, "allowed_token_ids", "999"),
        *(
            ({"logit_bias": {key: 1}}, "logit_bias", "logit_bias")
            for key in ("257", "-1", "a", "", " 1", "1.0", "٣", "01", "9" * 5000, "9" * 11)
        ),
        ({"logit_bias": {"1": 1e300}}, "logit_bias", "logit_bias"),
        ({"logit_bias": {str(i): 0 for i in range(4097)}}, "logit_bias", "4096"),
        ({"logprobs": 258}, "logprobs", "257"),
        ({"min_tokens": 6}, "min_tokens", "min_tokens"),
        ({"min_tokens": 1, "allowed_token_ids": [256]}, "min_tokens", "only stop tokens"),
        ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        ({"max_tokens": 2**31}, "max_tokens", "less than"),
        ({"seed": 2**64}, "seed", "less than"),
        ({"seed": -2}, "seed", "-1"),
        ({"n": 0}, "n", "1"),
        ({"n": 10**100}, "n", "n"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_p": 1.001}, "top_p", "1"),
        ({"min_p": -0.1}, "min_p", "0"),
        ({"temperature": -0.1}, "temperature", "0"),
        ({"repetition_penalty": 0}, "repetition_penalty", "0.01"),
        ({"presence_penalty": 101}, "presence_penalty", "100"),
        ({"echo": None}, "echo", "valid boolean"),
        ({"logprobs_stage": "cooked"}, "logprobs_stage", "'raw' or 'processed'"),
        ({"logprobs_stage": "processed"}, "logprobs_stage", "has no effect without logprobs"),
        ({"Temperature": 1}, "Temperature", "unknown field"),
        ({"inputs": "a"}, "inputs", "did you mean 'prompt'?"),
        ({"regex": "a)"}, "regex", "regex: invalid regular expression: unopened group"),
        ({"json_schema": {"not": {}}}, "json_schema", "the keyword 'not' is not supported"),
        ({"grammar": "start: x"}, "grammar", 'grammar: at 1(8): unknown name: "x"'),
        ({"regex": "a", "min_tokens": 2}, "min_tokens", "min_tokens and regex together could"),
        ({"regex": "a", "ignore_eos": True}, "regex", "leave out regex or ignore_eos"),
    ],
    "logits": [
        *PROMPTS,
        *POSITIONS,
        ({"token_ids": [257]}, "token_ids", "257"),
        ({"processing": {"top_k": 1}}, "processing", "stage is 'raw'"),
        ({"stage": "cooked"}, "stage", "'raw' or 'processed'"),
        ({**PROCESSED, "processing": {"frequency_penalty": 1.0}}, "processing", "completion_start"),
        ({**PROCESSED, "processing": {"frequency_penalty": 1.0, "completion_start": 60}},
         "processing", "completion_start is 60, but must be at most 59"),
        ({**PROCESSED, "processing": {"top_k": 1, "completion_start": 9}}, "processing",
         "completion_start has no effect without presence_penalty or frequency_penalty"),
        ({**PROCESSED, "processing": {"logit_bias": {"257": 1}}}, "logit_bias", "257"),
        ({**PROCESSED, "processing": {"allowed_token_ids": [257]}}, "allowed_token_ids", "257"),
        ({**PROCESSED, "processing": {"seed": 1}}, "processing", "'processing.seed'"),
        ({"max_tokens": 5}, "max_tokens", "unknown field"),
        *(
            ({"interventions": [EVERY_LAYER, change]}, param, said)
            for change, param, said in INTERVENTIONS
        ),
        ({"prompt": ["a"] * 64, "interventions": [{**EVERY_LAYER}] * 43}, "interventions",
         "there would be 8256 interventions"),
    ],
    "probs": [
        *PROMPTS,
        ({"top_k": 258}, "top_k", "257"),
        ({"top_k": 0}, "top_k", "1"),
        ({"token_ids": [257]}, "token_ids", "257"),
        ({"token_ids": []}, "token_ids", "at least 1"),
        ({"token_ids": [1], "top_k": 1}, "top_k", "top_k and token_ids are alternatives"),
        ({"temperature": 1}, "temperature", "unknown field"),
        ({"tokens": ["ab"]}, "tokens", "'ab' is 2 tokens"),
        ({"tokens": [""]}, "tokens", "is 0 tokens"),
        ({"tokens": []}, "tokens", "at least 1"),
        ({"tokens": ["a"], "token_ids": [1]}, "token_ids", "give one of them"),
        ({"processing": {"top_k": 1}}, "processing", "stage is 'raw'"),
        ({**PROCESSED, "processing": {"top_p": 0}}, "processing", "greater than 0"),
    ],
    "score": [
        *PROMPTS,
        ({"continuations": []}, "continuations", "at least 1"),
        ({"continuations": ["a", ""]}, "continuations", "empty"),
        ({"continuations": [[257]]}, "continuations", "257"),
        ({"continuations": ["x" * 70]}, "continuations", "128"),
        ({"continuations": ["x" * 129]}, "continuations", "128"),
        ({"continuations": "x"}, "continuations", "continuations"),
        *(
            ({"continuations": wrong}, "continuations",
             "continuations must be a list of strings and of lists of token ids")
            for wrong in ([1.5], [None], [["a"]], ["a", {}])
        ),
        ({"logprobs": 258}, "logprobs", "257"),
        ({"logprobs": -1}, "logprobs", "0"),
        ({"max_tokens": 1}, "max_tokens", "unknown field"),
    ],
    "hidden_states": [
        *PROMPTS,
        *POSITIONS,
        ({"layers": [4]}, "layers", "4 hidden states"),
        ({"layers": [-5]}, "layers", "-5"),
        ({"layers": [1, 0]}, "layers", "layers"),
        ({"layers": [0, -4]}, "layers", "layers"),
        ({"layers": []}, "layers", "at least 1"),
        ({"heads": [0]}, "heads", "unknown field"),
    ],
    "attention": [
        *PROMPTS,
        *POSITIONS,
        ({"layers": [3]}, "layers", "3 layers"),
        ({"heads": [4]}, "heads", "4 heads"),
        ({"heads": [0, 0]}, "heads", "heads"),
    ],
    "activations": [
        *PROMPTS,
        *POSITIONS,
        ({"stages": ["blocks.0.attention.queries"]}, "stages", "blocks.N.attention.q"),
        ({"stages": ["blocks.3.output"]}, "stages", "from 0 to 2"),
        ({"stages": []}, "stages", "at least 1"),
        ({"heads": [0]}, "heads", "no heads"),
        ({"stages": ["blocks.*.attention.q"], "heads": [4]}, "heads", "has 4 heads"),
    ],
    "sweep": [
        ({"over": []}, "over", "at least 1"),
        ({"over": ["heads", "heads"]}, "over", "an axis twice"),
        ({"vary": ZERO}, "over", "embedding has no layers"),
        ({"vary": {"stage": "blocks.*.output", "operation": "zero"}, "over": ["heads"]}, "over",
         "blocks.0.output has no heads"),
        ({"vary": {**ABLATE, "stage": "blocks.*.what"}}, "vary", "vary: no stage"),
        ({"token": "ab"}, "token", "'ab' is 2 tokens"),
        ({"token_id": 300}, "token_id", "300"),
        ({"token_id": 1, "minus_id": 1}, "minus", "is 0"),
        ({"token_id": [1, 2]}, "token_id", "token_id has 2 values for 1 prompt"),
        ({"prompt": ["a", "b"], "token": ["a"]}, "token", "token has 1 value for 2 prompts"),
        ({"token": 5}, "token", "a string, or a list with one for each prompt"),
        ({"metric": "loss", "minus": "a"}, "metric", "metric 'loss' takes no minus"),
        ({"metric": "kl", "token_id": 1}, "metric", "metric 'kl' takes no token"),
        ({"prompt": ["abc", "ab"], "over": ["positions"]}, "over", "3 and 2 tokens"),
        ({"position": 59}, "position", "59 tokens"),
        ({"vary": PATCH, "prompt": "ab"}, "vary", "values for 59 positions"),
        ({"vary": {**ABLATE, "operation": "set", "values": [1.0]}}, "vary",
         "vary: values have the shape [1, 1]"),
        ({"vary": {**PATCH, "from": {"prompt": ""}}}, "vary",
         "vary: a prompt in 'from' or 'minus' cannot be computed: the prompt is empty"),
        ({"interventions": [{**ABLATE, "heads": [0], "positions": [99]}]}, "interventions",
         "interventions[0]: positions has 99"),
        ({"vary": {**ABLATE, "positions": "generated"}}, "vary", "generates no tokens"),
    ],
    "lens": [
        *PROMPTS,
        *POSITIONS,
        ({"layers": [4]}, "layers", "4 hidden states"),
        ({"top_k": 300}, "top_k", "top_k is 300"),
        ({"tokens": ["ab"]}, "tokens", "'ab' is 2 tokens"),
        ({"tokens": ["a"], "token_ids": [1]}, "token_ids", "give one of them"),
        ({"token_ids": [257]}, "token_ids", "257"),
    ],
    "attributions": [
        *PROMPTS,
        ({"token": "ab"}, "token", "'ab' is 2 tokens"),
        ({"minus": ""}, "minus", "is 0 tokens"),
        ({"token": "a", "token_id": 1}, "token", "give one of them"),
        ({"minus": "a", "minus_id": 1}, "minus", "give one of them"),
        ({"token_id": 257}, "token_id", "outside the vocabulary of 257 ids"),
        ({"minus_id": 300}, "minus_id", "token id 300"),
        ({"token": "a", "minus": "a"}, "minus", "token and minus are both 97"),
        ({"position": 59}, "position", "the prompt has 59 tokens"),
        ({"position": -60}, "position", "-60"),
        ({"methods": []}, "methods", "at least 1"),
        ({"methods": ["saliency"]}, "methods", "'gradient_times_input'"),
        ({"methods": ["direct", "direct"]}, "methods", "names a method twice"),
        ({"steps": 4}, "steps", "steps is given, but methods has no 'integrated_gradients'"),
        ({"baseline": "zero"}, "baseline", "baseline is given"),
        ({**PATH, "steps": 0}, "steps", "1"),
        ({**PATH, "baseline": 257}, "baseline", "token id 257"),
        ({**PATH, "baseline": "mean"}, "baseline", "zero"),
        ({"interventions": []}, "interventions", "unknown field"),
        ({"stages": ["logits"]}, "stages", "earlier stage"),
        ({"direction": {"stage": "logits", "values": [1.0] * 257}}, "direction",
         "direction.stage is 'logits'"),
        ({"direction": {"stage": "nothing", "values": [1.0]}}, "direction",
         "direction.stage: no stage"),
    ],
    "circuit": [
        *PROMPTS,
        ({"token": "ab"}, "token", "'ab' is 2 tokens"),
        ({"token": "a", "token_id": 1}, "token", "give one of them"),
        ({"token_id": 257}, "token_id", "outside the vocabulary of 257 ids"),
        ({"token": "a", "minus": "a"}, "minus", "token and minus are both 97"),
        ({"position": 59}, "position", "the prompt has 59 tokens"),
        ({"share": 1.5}, "share", "less than or equal to 1"),
        ({"share": 0}, "share", "greater than 0"),
        ({"max_parts": 0}, "max_parts", "1"),
        ({"max_edges": 10_001}, "max_edges", "10000"),
        ({"methods": ["direct"]}, "methods", "unknown field"),
        ({"interventions": []}, "interventions", "unknown field"),
    ],
    "tokenize": [
        *(
            ({"prompt": prompt}, "prompt", "prompt must be a text or a list of 1 to 4096 texts; "
             "/detokenize takes token ids")
            for prompt in NO_TEXTS
        ),
        ({"add_special_tokens": True}, "add_special_tokens", "adds no token to a text"),
        ({"add_special_tokens": 0}, "add_special_tokens", "valid boolean"),
        ({"special_tokens": "both"}, "special_tokens", "'ids' or 'text'"),
        ({"pieces": "yes"}, "pieces", "valid boolean"),
        ({"text": "a"}, "text", "did you mean 'prompt'?"),
    ],
    "detokenize": [
        *(
            ({"tokens": tokens}, "tokens", "tokens must be a list of token ids (integers from 0")
            for tokens in NO_IDS
        ),
        *(
            ({"tokens": tokens}, "tokens", "outside the vocabulary of 257 ids (0 to 256)")
            for tokens in ([257], [0, 2**31 - 1], [[1], [300]])
        ),
    ],
}  # fmt: skip
SERVED_ALONE: dict[str, list[Row]] = {
    "generate": [
        ({"timeout": 0}, "timeout", "greater than 0"),
        ({"timeout": 1e9}, "timeout", "86400"),
        ({"model": 5}, "model", "valid string"),
        ({"model": "m" * 257}, "model", "256 characters"),
        ({"stream": "true"}, "stream", "valid boolean"),
        ({"stream": 1}, "stream", "valid boolean"),
        ({"n": 65}, "n", "the limit of one request is 64. Send fewer, or raise --max-sequences"),
        ({"n": 4096}, "n", "the limit of one request is 64"),
        ({"prompt": ["a"] * 22, "n": 3}, "n", "the limit of one request is 64"),
        *(({"prompt": ["a"] * count}, "prompt", "") for count in (65, 4096, 4097)),
    ],
    "logits": [
        *ARRAYS,
        ({"top_k": 258}, "top_k", "257"),
        ({"token_ids": [1], "top_k": 1}, "token_ids", "give one of them"),
        ({"dtype": "bfloat16"}, "dtype", "application/json cannot hold bfloat16"),
    ],
    "hidden_states": [*ARRAYS, ({"dtype": "bfloat16"}, "dtype", "cannot hold bfloat16")],
    "score": [
        (
            {"continuations": ["x"] * 65},
            "continuations",
            "65 sequences (prompts times continuations), but the limit of one request is 64",
        )
    ],
    "lens": [({"prompt": ["x"] * 65, "tokens": ["ab"]}, "prompt", "--max-sequences")],
    "attributions": [({"prompt": ["x"] * 65}, "prompt", "65 sequences")],
    "circuit": [({"prompt": ["x"] * 65}, "prompt", "65 sequences")],
}
"""Rows that only a server refuses: fields that depend on how the reply is sent, and counts that
only a server's queue limits."""
NOT_NPY: list[tuple[str, dict[str, Any], str, str]] = [
    ("logits", {"prompt": ["a", "b"]}, "prompt", "2 prompts"),
    ("logits", {"top_k": 3}, "top_k", "cannot be used with top_k"),
    ("logits", {"dtype": "bfloat16"}, "dtype", "cannot hold bfloat16"),
    ("hidden_states", {"dtype": "bfloat16"}, "dtype", "cannot hold bfloat16"),
    ("hidden_states", {"prompt": ["a", "b"]}, "prompt", "2 prompts"),
    ("activations", {"stages": ["blocks.*.attention.q"]}, "stages", "stages names 3"),
]


@pytest.fixture(scope="module")
def llm(checkpoint_path: Path) -> Iterator[LLM]:
    with LLM(checkpoint_path, device="cpu", threads=1, kernels="torch") as opened:
        yield opened


@pytest.fixture(scope="module", autouse=True)
def it_goes_on(server: Serving) -> Iterator[None]:
    """Check that the server still generates after all tests of this module."""
    yield
    assert server.generate("a", max_tokens=1, seed=1)["choices"][0]["token_ids"]


def rows(table: dict[str, list[Row]]) -> list[Any]:
    return [
        pytest.param(BY_NAME[name], *row, id=f"{name} {str(row[0])[:40]}")
        for name, listed in table.items()
        for row in listed
    ]


def refused(server: Serving, operation: Operation, fields: dict[str, Any]) -> ErrorDetail:
    """The error over HTTP. A refused stream has the same status and sends no event."""
    body = {**SMALLEST[operation.name], **fields}
    error = server.refused(operation.path, body)
    if "stream" in operation.body.model_fields and "stream" not in fields:
        assert server.refused(operation.path, {**body, "stream": True}) == error
    return error


def ask(llm: LLM, operation: Operation, fields: dict[str, Any]) -> Any:
    """The same request in process."""
    given = {**SMALLEST[operation.name], **fields}
    if operation.form == "completions":
        return llm.generate(given.pop("prompt"), **given)
    if operation.form in ("outputs", "listing"):
        return getattr(llm, operation.name)(**{"positions": "last", **given})
    return llm.run(operation.name, **given)


@pytest.mark.parametrize(("operation", "fields", "param", "said"), rows(REFUSED))
def test_wrong_field_is_refused_by_name_and_in_process_in_the_same_words(
    server: Serving, llm: LLM, operation: Operation, fields: dict[str, Any], param: str | None,
    said: str,
) -> None:  # fmt: skip
    error = refused(server, operation, fields)
    assert said in error.message
    assert error.param == param
    with pytest.raises(InvalidRequest) as caught:
        ask(llm, operation, fields)
    told = str(caught.value), caught.value.param, caught.value.code
    one_alone = operation.form in ("outputs", "listing")
    if not (one_alone and isinstance(fields.get("prompt"), list) and len(fields["prompt"]) > 1):
        assert told == (error.message, error.param, error.code)
    assert not llm._engine.has_work()


@pytest.mark.parametrize(("operation", "fields", "param", "said"), rows(SERVED_ALONE))
def test_field_of_a_reply_or_a_queue_is_refused_by_name(
    server: Serving, operation: Operation, fields: dict[str, Any], param: str | None, said: str
) -> None:
    error = refused(server, operation, fields)
    assert said in error.message
    assert error.param == param


@pytest.mark.parametrize(("name", "fields", "param", "said"), NOT_NPY)
def test_npy_refuses_several_arrays_by_name(
    server: Serving, name: str, fields: dict[str, Any], param: str, said: str
) -> None:
    error = server.refused(f"/{name}", {**SMALLEST[name], **fields}, Accept=NPY)
    assert said in error.message
    assert error.param == param


def test_intervention_is_named_by_its_place(server: Serving) -> None:
    for change, _, _ in INTERVENTIONS:
        error = server.refused(
            "/logits", {"prompt": PROMPT, "interventions": [EVERY_LAYER, change]}
        )
        assert "interventions[1]" in error.message


@pytest.mark.parametrize("name", ["generate", "lens", "logits", "probs", "score", "sweep"])
def test_intervention_that_makes_logits_infinite_is_named(
    server: Serving, llm: LLM, name: str
) -> None:
    """Such a request once got a 500. Later, /probs and /score answered it with wrong ranks."""
    blown: Any = {"interventions": [{**EVERY_LAYER, "factor": 1e30}]}
    error = server.refused(f"/{name}", {**SMALLEST[name], **blown})
    assert (error.param, error.code) == ("interventions", "intervention_failed")
    assert "not finite" in error.message
    with pytest.raises(GenerationError, match="not finite"):
        ask(llm, BY_NAME[name], blown)


# Random fields

VALUE: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(0, 300)
    | st.floats()
    | st.floats(0, 2)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4) | st.integers(0, 300).map(str), inner, max_size=3)
    ),
    max_leaves=8,
)


def refusal_of(operation: Operation, body: dict[str, Any]) -> InvalidRequest | None:
    """The error of a body, from validation alone."""
    try:
        parse(operation.body, body)
    except InvalidRequest as error:
        return error
    return None


FIELDS = sorted({name for operation in BY_NAME.values() for name in operation.body.model_fields})


@pytest.mark.parametrize("operation", BY_NAME.values(), ids=BY_NAME)
@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=st.dictionaries(st.sampled_from([*FIELDS, "unknown"]), VALUE, max_size=3))
@example(fields={"seed": 2**70, "temperature": float("nan"), "timeout": float("inf")})
def test_any_fields_get_an_answer_and_the_same_refusal_in_process(
    server: Serving, operation: Operation, fields: dict[str, Any]
) -> None:
    """The bodies may have NaN, Infinity and lone surrogates, which json.dumps writes and careless
    clients send."""
    body = {**SMALLEST[operation.name], **fields}
    response = server.post(operation.path, json.dumps(body).encode())
    if (refusal := refusal_of(operation, body)) is not None:
        error = error_of(response)
        assert (str(refusal), refusal.param) == (error.message, error.param)
        return
    if response.status_code != 200:
        error_of(response, response.status_code)
        assert response.status_code < 500 or response.status_code == 504
    elif fields.get("stream"):
        assert events(response.content)
    else:
        TypeAdapter(operation.reply).validate_python(response.json())
