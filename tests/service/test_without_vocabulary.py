"""A model without a vocabulary, over HTTP: it returns the same numbers as the same weights with a
vocabulary. Requests with text are refused with advice.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from logitd.model.llm import LLM, InvalidRequest, SamplingParams
from logitd.model.text.tokenizer import NO_VOCABULARY, Tokenizer
from logitd.service.cli.main import run
from logitd.service.client import BadRequestError, Client
from tests.model.factories import VOCAB_SIZE, save_tiny_checkpoint
from tests.service.serving import Serving, serving

IDS = [72, 101, 108, 112, 33, 200, 10, 7]
PROCESSING = {"temperature": 0.7, "top_k": 20}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of `server`'s checkpoint, without its vocabulary."""
    folder = tmp_path_factory.mktemp("ids") / "tiny"
    return save_tiny_checkpoint(folder, tokenizer=Tokenizer.without_text(VOCAB_SIZE)).path


@pytest.fixture(scope="module")
def ids(path: Path) -> Iterator[Serving]:
    with serving(path, slots=4) as running:
        yield running


def without_text(value: Any) -> Any:
    """A reply without times, without ids of replies, and without the texts of tokens."""
    if isinstance(value, dict):
        left_out = {"id", "created", "timings", "checkpoint", "model", "text", "bytes",
                    "bits_per_byte", "cached_tokens"}  # fmt: skip
        if "bytes" in value:  # the id of a token is compared
            left_out = left_out - {"id"}
        return {k: without_text(v) for k, v in value.items() if k not in left_out}
    return [without_text(item) for item in value] if isinstance(value, list) else value


def texts_in(value: Any) -> Iterator[Any]:
    """Texts and bytes of the tokens of a reply."""
    if isinstance(value, dict):
        yield from (value[name] for name in ("text", "bytes") if name in value)
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from texts_in(item)


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/generate", {"prompt": IDS, "max_tokens": 9, "seed": 3, "n": 2, "logprobs": 3}),
        ("/generate", {"prompt": [IDS, [1]], "max_tokens": 5, "seed": 3, "echo": True,
                       "logprobs": 1, "prompt_logprobs": 2, "stop_token_ids": [5]}),
        ("/generate", {"prompt": IDS, "max_tokens": 5, "seed": 1, "allowed_token_ids": [1, 2, 3],
                       "logit_bias": {"2": 1.5}, "repetition_penalty": 1.2}),
        ("/probs", {"prompt": IDS, "top_k": 5, "perplexity": True}),
        ("/probs", {"prompt": IDS, "token_ids": [4, 256]}),
        ("/score", {"prompt": IDS, "logprobs": 2}),
        ("/score", {"prompt": IDS, "continuations": [[1, 2], [3]]}),
        ("/logits", {"prompt": IDS, "positions": "all"}),
        ("/logits", {"prompt": IDS, "top_k": 4, "stage": "processed", "processing": PROCESSING}),
        ("/hidden_states", {"prompt": IDS}),
        ("/attention", {"prompt": IDS}),
        ("/attributions", {"prompt": IDS, "methods": ["direct", "gradient_times_input"]}),
    ],
)  # fmt: skip
def test_numbers_are_those_of_the_same_weights(
    endpoint: str, body: dict[str, Any], ids: Serving, server: Serving
) -> None:
    fields = {"ignore_eos": True} if endpoint == "/generate" else {}
    reply, expected = ids.json(endpoint, body | fields), server.json(endpoint, body | fields)
    assert without_text(reply) == without_text(expected)
    assert all(text in ("", []) for text in texts_in(reply))
    assert any(text not in ("", []) for text in texts_in(expected)) or "top_k" not in body


def test_stream_yields_ids_on_arrival(ids: Serving) -> None:
    body = {"prompt": IDS, "max_tokens": 6, "seed": 3}
    whole = ids.generate(**body)["choices"][0]
    lines = ids.post("/generate", body | {"stream": True}).text.split("\n\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    assert [i for choice in choices for i in choice["token_ids"]] == whole["token_ids"]
    assert whole["text"] == "" == "".join(choice["text"] for choice in choices)


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        ("/generate", {"prompt": "text"}, "prompt"),
        ("/generate", {"prompt": "x" * 1_000_000}, "prompt"),
        ("/generate", {"prompt": IDS, "stop": "a"}, "stop"),
        ("/generate", {"prompt": IDS, "stop": ["a", "b"]}, "stop"),
        ("/generate", {"prompt": IDS, "regex": "a+"}, "regex"),
        ("/generate", {"prompt": IDS, "json_schema": {"type": "object"}}, "json_schema"),
        ("/generate", {"prompt": IDS, "choice": ["a"]}, "choice"),
        ("/generate", {"prompt": IDS, "grammar": 'start: "a"'}, "grammar"),
        ("/probs", {"prompt": "text"}, "prompt"),
        ("/probs", {"prompt": IDS, "tokens": ["a"]}, "tokens"),
        ("/score", {"prompt": "text"}, "prompt"),
        ("/score", {"prompt": IDS, "continuations": ["a"]}, "continuations"),
        ("/logits", {"prompt": "text"}, "prompt"),
        ("/hidden_states", {"prompt": "text"}, "prompt"),
        ("/attention", {"prompt": "text"}, "prompt"),
        ("/attributions", {"prompt": IDS, "token": "a"}, "token"),
        ("/tokenize", {"prompt": "text"}, "prompt"),
        ("/tokenize", {"prompt": ""}, "prompt"),
        ("/detokenize", {"tokens": [1, 2]}, "tokens"),
        ("/v1/completions", {"prompt": "text"}, "prompt"),
        ("/v1/completions", {"prompt": IDS, "stop": "a"}, "stop"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "messages"),
    ],
)
def test_texts_are_rejected_with_advice(
    endpoint: str, body: dict[str, Any], param: str, ids: Serving
) -> None:
    reply = ids.post(endpoint, body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, param, "no_vocabulary")
    assert NO_VOCABULARY in error["message"]


def test_facts_state_that_there_is_no_vocabulary(ids: Serving) -> None:
    told = ids.client.get("/tokenizer_info").json()
    assert (told["kind"], told["vocab_size"], told["eos_token"]) == ("none", VOCAB_SIZE, None)
    assert (told["pattern"], told["special_tokens"]) == ("", {})
    assert ids.client.get("/info").json()["vocabulary"] == "none"


def test_openais_completions_take_ids(ids: Serving, server: Serving) -> None:
    body = {"prompt": IDS, "max_tokens": 5, "seed": 3, "logprobs": 2, "ignore_eos": True}
    reply, expected = ids.json("/v1/completions", body), server.json("/v1/completions", body)
    (choice,), (other,) = reply["choices"], expected["choices"]
    lists = choice["logprobs"]
    assert choice["text"] == ""
    assert lists["token_logprobs"] == other["logprobs"]["token_logprobs"]
    generated = ids.generate(IDS, max_tokens=5, seed=3, ignore_eos=True)["choices"][0]["token_ids"]
    assert lists["tokens"] == [f"token_id:{token_id}" for token_id in generated]
    client = openai.OpenAI(base_url=f"{ids.url}/v1", api_key="none", max_retries=0)
    stream = client.completions.create(
        model="tiny", prompt=IDS, max_tokens=100, seed=3, logprobs=0, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    chunks = [chunk.choices[0].logprobs.tokens for chunk in stream if chunk.choices[0].logprobs]
    assert [name for names in chunks for name in names or []][:5] == lists["tokens"]
    assert len([names for names in chunks if names]) > 1, "they come as they are generated"
    echoed = body | {"echo": True, "max_tokens": 0}
    scored = ids.json("/v1/completions", echoed)["choices"][0]["logprobs"]
    assert scored["tokens"] == [f"token_id:{token_id}" for token_id in IDS]


def test_client_gets_ids(ids: Serving) -> None:
    with Client(ids.url) as client:
        completion = client.generate(IDS, max_tokens=4, seed=1)
        assert len(completion.choices[0].token_ids) == 4
        assert client.tokenizer_info().kind == "none"
        with pytest.raises(BadRequestError, match="this model has no vocabulary"):
            client.generate("text", max_tokens=4)


def test_llm_takes_ids(path: Path) -> None:
    with LLM(path, device="cpu", threads=1) as llm:
        (completion,) = llm.generate([IDS], SamplingParams(max_tokens=4, seed=1))
        assert (completion.text, len(completion.token_ids)) == ("", 4)
        assert llm.logits(IDS).shape == (len(IDS), VOCAB_SIZE)
        sentence = re.escape(NO_VOCABULARY)
        with pytest.raises(InvalidRequest, match=f"prompt is a string, but {sentence}"):
            llm.logits("text")
        with pytest.raises(InvalidRequest, match=f"stop is a string, but {sentence}"):
            llm.generate([IDS], SamplingParams(max_tokens=4, seed=1), stop=["a"])


def test_listed_commands_exist(
    path: Path, tmp_path: Path, ids: Serving, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    flags = ["--checkpoint", str(path), "--threads", "1", "--kernels", "torch"]
    told = [*flags, "--seed", "3", "--max-tokens", "5"]
    prompt = " ".join(map(str, IDS))
    capsys.readouterr()
    assert run(["generate", prompt, *told]) == 0
    (choice,) = ids.generate(IDS, max_tokens=5, seed=3, temperature=0.8)["choices"]
    assert capsys.readouterr().out.split() == list(map(str, [*IDS, *choice["token_ids"]]))
    assert run(["generate", "def main():", *told]) == 1
    assert "'def main():' is not a list of token ids, and this model" in capsys.readouterr().err
    assert run(["inspect", str(path)]) == 0
    assert "3 tokens: 0 1 2" in capsys.readouterr().out
    assert run(["inspect", str(path), "--text", "5, 6"]) == 0
    assert "2 tokens: 5 6" in capsys.readouterr().out
    for text, sentence in (("abc", "this model has no vocabulary"), ("999", "outside the vocab")):
        assert run(["inspect", str(path), "--text", text]) == 1
        assert sentence in capsys.readouterr().err
    (tmp_path / "text.txt").write_text("some text " * 200)
    for data in (["--data", str(tmp_path / "text.txt")], []):
        assert run(["eval", str(path), *data]) == 1
        assert "tiny has no vocabulary, so it has no loss on a text" in capsys.readouterr().err
    assert run(["train", "--from", str(path), "--data", str(tmp_path / "text.txt"),
                "--out", str(tmp_path / "run")]) == 1  # fmt: skip
    assert "has no vocabulary" in capsys.readouterr().err
    assert run(["export", str(path), "x.gguf", "--to", "gguf"]) == 1
    assert "is token ids without a text, but llama.cpp needs byte" in capsys.readouterr().err
    assert run(["export", str(path), "theirs"]) == 0
    assert "no tokenizer is written" in capsys.readouterr().out
    written = sorted(file.name for file in Path("theirs").iterdir())
    assert written == ["config.json", "generation_config.json", "model.safetensors"]
    assert run(["import", "theirs", "again", "--tokenizer", "none"]) == 0
