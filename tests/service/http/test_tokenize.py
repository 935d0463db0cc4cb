"""POST /tokenize, POST /detokenize and GET /tokenizer_info: ids, bytes and offsets of the tokens of
a text; and the calls of evaluation programs that use the server as a remote tokenizer.
"""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from logitd.model.operations import tokenize
from logitd.model.operations.body import MAX_IDS
from logitd.model.operations.tokenize import (
    MAX_PIECES,
    MAX_UNKNOWN,
    DetokenizeListReply,
    DetokenizeReply,
    TokenizeReply,
)
from logitd.model.text import pieces
from logitd.model.text.tokenizer import END_OF_TEXT, SPLIT_PATTERN, Tokenizer
from logitd.service.http.schemas import TokenizerInfo
from logitd.service.models.turns import CallerTurns
from tests.model.factories import save_tiny_checkpoint, tiny_config, tiny_gpt
from tests.service.serving import (
    TEST_TIMEOUT,
    Poster,
    Serving,
    error_of,
    eventually,
    held,
    request_bytes,
    serving,
)

MERGES = (
    *(b"th", b"the", b" t", b" th", b" the"),
    # Parts of characters, and tokens that begin in one character and end in another.
    *(b"\xe2\x82", b"\xf0\x9f", b"\xf0\x9f\x98", b"t\xc3", b"\xa9 "),
)
TOKENIZER = Tokenizer(
    ranks={bytes([byte]): byte for byte in range(256)}
    | {token: 256 + index for index, token in enumerate(MERGES)},
    pattern=r"[^\n]+|\n+",
    special_tokens={END_OF_TEXT: 256 + len(MERGES), "<|user|>": 257 + len(MERGES)},
)
END_OF_TEXT_ID = 256 + len(MERGES)

TEXT = st.lists(
    st.text(max_size=12) | st.sampled_from(["the ", "€", "té ", "😀", END_OF_TEXT, "<|user|>"])
).map("".join)


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A service whose vocabulary has tokens that split characters."""
    gpt = tiny_gpt(tiny_config(vocab_size=TOKENIZER.vocab_size))
    path = tmp_path_factory.mktemp("checkpoints") / "merging"
    save_tiny_checkpoint(path, gpt=gpt, tokenizer=TOKENIZER)
    with serving(path) as running:
        yield running


# Requests of evaluation programs with a remote tokenizer


@pytest.mark.parametrize("text", ["test", "the 😀", "", " a\n\nb", "x" * 5000])
def test_remote_tokenizer_gets_its_fields(merging: Serving, text: str) -> None:
    body = {"prompt": text, "add_special_tokens": False}
    ids = merging.json("/tokenize", body)["tokens"]
    assert ids == TOKENIZER.encode(text)
    assert merging.json("/detokenize", {"tokens": ids})["prompt"] == text


def test_remote_tokenizer_gets_the_end_of_text(merging: Serving) -> None:
    response = merging.client.get("/tokenizer_info", headers={"Content-Type": "application/json"})
    info = response.json()
    assert response.status_code == 200
    assert info["eos_token"] == END_OF_TEXT
    assert (info["bos_token"], info["pad_token"], info["chat_template"]) == (None, None, None)
    body = {"prompt": info["eos_token"], "add_special_tokens": False}
    assert merging.json("/tokenize", body)["tokens"] == [info["eos_token_id"]] == [END_OF_TEXT_ID]


# Texts to ids


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXT, names=st.sampled_from(["ids", "text"]))
@example(text="", names="ids")
def test_pieces_add_up_to_the_text(merging: Serving, text: str, names: str) -> None:
    body = {"prompt": text, "special_tokens": names}
    reply = TokenizeReply.model_validate(merging.json("/tokenize", body))
    assert reply.tokens == TOKENIZER.encode(text, special_ids=names == "ids")
    assert reply.count == len(reply.tokens)
    assert reply.pieces is not None
    assert [piece.id for piece in reply.pieces] == reply.tokens
    assert b"".join(bytes(piece.bytes) for piece in reply.pieces) == text.encode()
    for piece in reply.pieces:
        part = text[piece.start : piece.end]
        assert bytes(piece.bytes) in part.encode(), "its characters contain its bytes"
        assert piece.text == bytes(piece.bytes).decode(errors="replace")
        assert piece.special == (piece.id >= END_OF_TEXT_ID)
    covered = [index for piece in reply.pieces for index in range(piece.start, piece.end)]
    assert sorted(set(covered)) == list(range(len(text))), "every character belongs to a piece"
    assert covered == sorted(covered), "the pieces are in order"


def test_split_character_has_its_offsets(merging: Serving) -> None:
    pieces = merging.json("/tokenize", {"prompt": "té 😀"})["pieces"]
    assert [(bytes(one["bytes"]), one["start"], one["end"]) for one in pieces] == [
        (b"t\xc3", 0, 2),
        (b"\xa9 ", 1, 3),
        (b"\xf0\x9f\x98", 3, 4),
        (b"\x80", 3, 4),
    ]
    assert [one["text"] for one in pieces] == ["t\ufffd", "\ufffd ", "\ufffd", "\ufffd"]


def test_special_token_names_in_prompts_are_text(merging: Serving) -> None:
    text = f"a{END_OF_TEXT}"
    plain = merging.json("/tokenize", {"prompt": text, "special_tokens": "text"})["tokens"]
    (prompt,) = merging.json("/logits", {"prompt": text, "top_k": 1})["prompts"]
    assert plain == prompt["token_ids"] == TOKENIZER.encode(text)
    assert merging.json("/tokenize", {"prompt": text})["tokens"] == [97, END_OF_TEXT_ID]


# The number of described tokens


@pytest.mark.parametrize("form", ["one text", "several"])
def test_pieces_are_described_up_to_a_number_of_them(merging: Serving, form: str) -> None:
    def ask(count: int, **fields: Any) -> httpx.Response:
        text: Any = "x" * count if form == "one text" else ["x" * (count - 5), "x" * 5]
        return merging.post("/tokenize", {"prompt": text, **fields})

    def pieces(response: httpx.Response) -> list[Any]:
        reply = response.json()
        return [one["pieces"] for one in reply.get("prompts", [reply])]

    assert sum(map(len, pieces(ask(MAX_PIECES)))) == MAX_PIECES
    assert set(pieces(ask(MAX_PIECES + 1))) == {None}
    assert set(pieces(ask(5 if form == "one text" else 6, pieces=False))) == {None}
    error = error_of(ask(MAX_PIECES + 1, pieces=True))
    assert error.param == "pieces"
    assert f"{MAX_PIECES + 1} tokens, but `pieces` can list at most {MAX_PIECES}" in error.message


def test_text_of_megabytes_is_tokenized(merging: Serving) -> None:
    text = "the 😀\n" * 20_000
    *_, reply = merging.json("/tokenize", {"prompt": [text] * 6})["prompts"]
    assert reply["pieces"] is None
    assert reply["tokens"] == TOKENIZER.encode(text)
    error = merging.refused("/tokenize", {"prompt": text + "x" * (MAX_UNKNOWN - len(text) + 1)})
    assert (error.param, "131073 characters, but the limit is 131072" in error.message) == (
        "prompt",
        True,
    )
    assert merging.json("/detokenize", {"tokens": reply["tokens"][:MAX_IDS]})["prompt"] in text


def test_short_texts_wait_only_for_each_other(merging: Serving) -> None:
    """Several threads that describe tokens would keep the event loop from running."""
    with held(merging, merging.state.short_texts):
        waiting = Poster(merging.url, "/tokenize", {"prompt": "the"})
        assert merging.json("/tokenize", LONG_WORK["/tokenize"])["count"]
        assert merging.generate("a", max_tokens=1, seed=1)["choices"]
        with pytest.raises(AssertionError, match="not within"):
            eventually(lambda: waiting.answered, timeout=0.5)
    assert waiting.response().status_code == 200


LONG_WORK: dict[str, Any] = {
    "/tokenize": {"prompt": "x" * 100_000},
    "/detokenize": {"tokens": [120] * 120_000},
}


@pytest.mark.parametrize("path", LONG_WORK)
def test_long_texts_wait_only_for_each_other(merging: Serving, path: str) -> None:
    with held(merging, merging.state.long_texts):
        waiting = Poster(merging.url, path, LONG_WORK[path])
        assert merging.json("/tokenize", {"prompt": "the"})["count"] == 1
        assert merging.generate("a", max_tokens=1, seed=1)["choices"]
        with pytest.raises(AssertionError, match="not within"):
            eventually(lambda: waiting.answered, timeout=1.0)
    assert waiting.response().status_code == 200


@pytest.mark.parametrize(
    ("path", "name", "fields"),
    [
        ("/tokenize", "long_texts", {"special_tokens": "text"}),
        ("/generate", "plans", {"max_tokens": 1, "stop": ["x" * 90] * 4}),
    ],
)
def test_callers_take_turns_for_texts(
    merging: Serving, monkeypatch: pytest.MonkeyPatch, path: str, name: str, fields: dict[str, Any]
) -> None:
    encoded: list[str] = []
    encode = Tokenizer.encode

    def watched(tokenizer: Tokenizer, text: str, **options: Any) -> list[int]:
        encoded.append(text[:2])
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    turns = CallerTurns()
    monkeypatch.setattr(merging.state, name, turns)
    posts = list[Poster]()
    with held(merging, turns):
        for place, prompt in enumerate(("a0", "a1", "a2", "b0")):
            text = prompt if path == "/generate" else prompt + "x" * 9000
            address = {"X-Forwarded-For": f"10.0.0.{prompt[0] == 'b'}"}
            posts.append(Poster(merging.url, path, {"prompt": text, **fields}, **address))
            eventually(lambda: sum(map(len, turns._waiting.values())) > place)  # noqa: B023
    assert [post.response().status_code for post in posts] == [200] * 4
    assert encoded == ["a0", "b0", "a1", "a2"]


def test_waiting_client_may_disconnect(merging: Serving) -> None:
    gone = {"endpoint": "/tokenize", "status": "499"}
    before = merging.sample("logitd_http_requests_total", **gone)
    with held(merging, merging.state.long_texts):
        with merging.connect() as raw:
            raw.sendall(request_bytes("/tokenize", LONG_WORK["/tokenize"]))
        eventually(lambda: merging.sample("logitd_http_requests_total", **gone) == before + 1)
    assert merging.json("/tokenize", LONG_WORK["/tokenize"])["count"] == 100_000


def test_long_text_keeps_the_others_waiting_after_its_client_has_left(
    merging: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread cannot be interrupted. If it gave up its turn, clients that send and leave would
    occupy every thread."""
    begun, end = threading.Event(), threading.Event()

    def slow_tokenized(*_: Any) -> list[dict[str, Any]]:
        begun.set()
        end.wait(TEST_TIMEOUT)
        return [{}]

    monkeypatch.setattr(tokenize, "_tokenized", slow_tokenized)
    with merging.connect() as raw:
        raw.sendall(request_bytes("/tokenize", LONG_WORK["/tokenize"]))
        assert begun.wait(TEST_TIMEOUT)
    try:
        with pytest.raises(AssertionError, match="not within"):
            eventually(lambda: not merging.state.long_texts.is_full, timeout=0.2)
    finally:
        end.set()
    eventually(lambda: not merging.state.long_texts.is_full)


# Ids to text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.integers(0, TOKENIZER.vocab_size - 1)))
@example(ids=[])
@example(ids=[0xF0, 0x9F])
def test_text_is_a_view_of_bytes(merging: Serving, ids: list[int]) -> None:
    reply = DetokenizeReply.model_validate(merging.json("/detokenize", {"tokens": ids}))
    assert bytes(reply.bytes) == TOKENIZER.decode_bytes(ids)
    assert reply.prompt == TOKENIZER.decode(ids)


def test_several_lists_of_ids(merging: Serving) -> None:
    lists: list[list[int]] = [[104, 105], [], [END_OF_TEXT_ID], [0xF0]]
    reply = DetokenizeListReply.model_validate(merging.json("/detokenize", {"tokens": lists}))
    assert [one.index for one in reply.prompts] == [0, 1, 2, 3]
    assert [one.prompt for one in reply.prompts] == ["hi", "", END_OF_TEXT, "\ufffd"]
    assert [bytes(one.bytes) for one in reply.prompts][3] == b"\xf0"


def test_ids_may_have_a_text_larger_than_a_body(checkpoint_path: Path) -> None:
    with serving(checkpoint_path, max_body_bytes=5000) as server:
        name = len(END_OF_TEXT)
        fits = 5000 // name
        assert len(server.json("/detokenize", {"tokens": [256] * fits})["bytes"]) == fits * name
        for tokens in ([256] * (fits + 1), [[256] * fits, [256]]):
            error = server.refused("/detokenize", {"tokens": tokens})
            assert error.param == "tokens"
            assert f"has {(fits + 1) * name} bytes, but the limit is 5000" in error.message
            assert "--max-body-bytes" in error.message


# The vocabulary


def test_info_describes_the_vocabulary(merging: Serving) -> None:
    info = TokenizerInfo.model_validate(merging.client.get("/tokenizer_info").json())
    assert info.vocab_size == TOKENIZER.vocab_size
    assert info.eos_token_id == END_OF_TEXT_ID
    assert info.special_tokens == TOKENIZER.special_tokens
    assert info.pattern == TOKENIZER.pattern
    assert info.model == info.checkpoint.name == "merging"


def test_vocabulary_may_lack_an_end_of_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(
        ranks={bytes([byte]): byte for byte in range(256)},
        pattern=SPLIT_PATTERN,
        special_tokens={"<|user|>": 256},
    )
    with serving(save_tiny_checkpoint(tmp_path / "bare", tokenizer=tokenizer).path) as server:
        info = server.client.get("/tokenizer_info").json()
        assert info["eos_token"] is info["eos_token_id"] is None
        assert (info["eos_token_ids"], info["added_tokens"]) == ([], {})
        assert info["special_tokens"] == {"<|user|>": 256}
        assert server.json("/tokenize", {"prompt": END_OF_TEXT})["count"] == len(END_OF_TEXT)


# Refusals


def test_text_that_times_out_the_pattern_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(
        ranks={bytes([byte]): byte for byte in range(256)},
        pattern=r"(x+x+)+y(?!z)|.",  # takes forever on a row of x
        special_tokens={END_OF_TEXT: 256},
    )
    with serving(save_tiny_checkpoint(tmp_path / "slow", tokenizer=tokenizer).path) as server:
        for path in ("/tokenize", "/generate"):
            error = server.refused(path, {"prompt": "x" * 60})
            assert error.param == "prompt"
            assert error.message.startswith("the prompt cannot be tokenized: ")
        assert server.json("/tokenize", {"prompt": "abc"})["count"] == 3


def test_text_of_too_many_added_tokens_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(
        ranks={bytes([byte]): byte for byte in range(256)},
        pattern=SPLIT_PATTERN,
        special_tokens={END_OF_TEXT: 256},
        added_tokens={"ab" * 20: 257},
    )
    gpt = tiny_gpt(tiny_config(vocab_size=258, context_length=64))
    with serving(save_tiny_checkpoint(tmp_path / "added", gpt, tokenizer=tokenizer).path) as server:
        error = server.refused("/generate", {"prompt": ("ab" * 20 + "c") * 50})
        assert (error.param, error.code) == ("prompt", "context_length_exceeded")
        assert "make at least 65 tokens" in error.message


@pytest.mark.parametrize("path", ["/tokenize", "/generate"])
def test_texts_of_a_request_share_the_time_of_a_slow_pattern(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    tokenizer = Tokenizer(
        ranks={bytes([byte]): byte for byte in range(256)},
        pattern=r"a+b|[\s\S]",  # takes quadratic time on a row of a
        special_tokens={END_OF_TEXT: 256},
    )
    gpt = tiny_gpt(tiny_config(context_length=8192))
    monkeypatch.setattr(pieces, "MOST_SECONDS", 0.5)
    with serving(save_tiny_checkpoint(tmp_path / "slow", gpt, tokenizer=tokenizer).path) as server:
        began = time.process_time()
        error = server.refused(path, {"prompt": ["a" * 8000] * 60})
        assert (error.param, "all texts of a request" in error.message) == ("prompt", True)
        assert time.process_time() - began < 2
        assert server.json("/tokenize", {"prompt": "abc"})["count"] == 3
