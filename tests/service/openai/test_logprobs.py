"""Names of tokens, and the tokens that make up a text; without a server."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitd.model.inference.engine.events import (
    FinishEvent,
    FinishReason,
    SequenceTimes,
    TokenEvent,
)
from logitd.model.inference.sampling.params import SamplingParams, TokenLogprob
from logitd.model.inference.sampling.results import ScoredToken
from logitd.model.operations.completion import Completion
from logitd.model.text.tokenizer import SPLIT_PATTERN, Tokenizer
from logitd.service.openai.logprobs import (
    PlacedToken,
    ShownTokens,
    chat_logprobs,
    completion_logprobs,
    token_name,
)
from tests.model.factories import byte_tokenizer

END = 256
PARAMS = SamplingParams(max_tokens=99, seed=0, stop_token_ids=frozenset({END}))
EURO = "€".encode()


def vocabulary(*longer: bytes, **special_tokens: int) -> Tokenizer:
    ranks = {bytes([byte]): byte for byte in range(256)}
    for token in longer:
        ranks[token] = len(ranks)
    return Tokenizer(ranks=ranks, pattern=SPLIT_PATTERN, special_tokens=special_tokens)


# Names


@pytest.mark.parametrize(
    ("token", "name"),
    [
        (b"a", "a"),
        (b"\n", "\n"),
        (b"\x00", "\x00"),
        (b"\xe2", "bytes:\\xe2"),
        (b"a\xe2\x82", "bytes:\\x61\\xe2\\x82"),
        (EURO, "€"),
        (b" the", " the"),
        ("\ufffd".encode(), "\ufffd"),
        (b"bytes:\\xe2", "bytes:" + "".join(f"\\x{byte:02x}" for byte in b"bytes:\\xe2")),
        (b"token_id:9", "bytes:" + "".join(f"\\x{byte:02x}" for byte in b"token_id:9")),
    ],
)
def test_token_is_named_by_its_text_or_its_bytes(token: bytes, name: str) -> None:
    tokenizer = vocabulary(*([token] if len(token) > 1 else []))
    assert token_name(tokenizer, tokenizer.ranks[token]) == name


def test_ambiguous_special_token_has_another_name() -> None:
    tokenizer = vocabulary(b"<s>", **{"<s>": 300, "</s>": 302})
    assert token_name(tokenizer, 256) == "<s>"
    assert token_name(tokenizer, 300) == "bytes:\\x3c\\x73\\x3e"
    assert token_name(tokenizer, 302) == "</s>"
    assert token_name(tokenizer, 301) == "token_id:301", "a gap"


@given(st.lists(st.binary(min_size=2, max_size=12) | st.sampled_from(
    [b"bytes:\\xff", b"bytes:", b"token_id:300", b"<s>", EURO, EURO[:2]]), unique=True, max_size=20
))  # fmt: skip
def test_no_two_ids_have_one_name(longer: list[bytes]) -> None:
    tokenizer = vocabulary(*longer, **{"<s>": 300, "é": 310})
    names = [token_name(tokenizer, token_id) for token_id in range(tokenizer.vocab_size)]
    assert len(set(names)) == len(names)


# Tokens that a text shows


def event(token_id: int) -> TokenEvent:
    chosen = TokenLogprob(token_id, -0.5, 1)
    return TokenEvent("gen-1", 0, token_id, chosen, (chosen,))


def finish(stop_token_id: int | None) -> FinishEvent:
    reason = FinishReason.LENGTH if stop_token_id is None else FinishReason.STOP
    times = SequenceTimes(0, 0, 0, 0)
    return FinishEvent("gen-1", 0, reason, times, 1, 0, 1, stop_token_id=stop_token_id)


def grown(
    token_ids: list[int],
    *stop: str,
    tokenizer: Tokenizer | None = None,
    echo: bytes = b"",
    looks: tuple[int, ...] = (),
) -> tuple[str, list[PlacedToken]]:
    """Text and tokens of a choice. Both are read after each token whose index is in `looks`, and
    again at the end."""
    tokenizer = tokenizer or byte_tokenizer()
    one = Completion(tokenizer, index=0, prompt_index=0, stop=stop, params=PARAMS, echo=list(echo))
    shown = ShownTokens(prompt_tokens=len(echo))
    text, placed = "", []

    def look() -> None:
        nonlocal text
        if (piece := one.take()) is not None:
            choice = piece.to_json(tokenizer)
            text += choice["text"]
            placed.extend(shown.push(choice))
            for each in placed:
                assert each.offset < len(text) or choice["finish_reason"], (
                    "text and tokens together"
                )

    one.push_prompt([ScoredToken(byte, TokenLogprob(byte, -1.0, 1)) for byte in echo])
    for place, token_id in enumerate(token_ids):
        one.push(event(token_id))
        if place in looks:
            look()
    one.finish(finish(END if token_ids[-1:] == [END] else None))
    look()
    return text, placed


def listed(placed: list[PlacedToken]) -> list[tuple[int, int]]:
    return [(one.token["id"], one.offset) for one in placed]


def test_tokens_of_a_character_are_in_the_same_place() -> None:
    text, placed = grown([*b"a", *EURO, *b"b"])
    assert text == "a€b"
    assert listed(placed) == [(97, 0), (EURO[0], 1), (EURO[1], 1), (EURO[2], 1), (98, 2)]


def test_bytes_that_are_no_character_have_a_place() -> None:
    text, placed = grown([*EURO[:2], *b"a", *EURO[:1]])
    assert text == "\ufffda"
    assert [place for _, place in listed(placed)] == [0, 0, 0, 2]


def test_echo_is_decoded_by_itself() -> None:
    text, placed = grown([*EURO[1:], *b"x"], echo=b"a" + EURO[:1])
    assert text == "a\ufffd\ufffd\ufffdx"
    assert [place for _, place in listed(placed)] == [0, 1, 2, 3, 4]


def test_stop_token_is_listed_last_after_the_text() -> None:
    text, placed = grown([*b"ab", END])
    assert (text, listed(placed)) == ("ab", [(97, 0), (98, 1), (END, 2)])
    text, placed = grown([*b"a", *EURO[:1], END])
    assert (text, listed(placed)) == ("a\ufffd", [(97, 0), (EURO[0], 1), (END, 2)])
    assert listed(grown([END])[1]) == [(END, 0)]


@pytest.mark.parametrize("looks", [(), (0, 1, 2, 3, 4, 5), (2,), (3,)])
def test_tokens_after_a_stop_string_are_not_listed(looks: tuple[int, ...]) -> None:
    text, placed = grown(list(b"abcdef"), "cd", looks=looks)
    assert (text, listed(placed)) == ("ab", [(97, 0), (98, 1)])
    assert grown(list(b"abcdef"), "ab", looks=looks) == ("", [])


def test_token_split_by_a_stop_string_is_listed_whole() -> None:
    tokenizer = vocabulary(b"bcd", **{"<|endoftext|>": 999})
    params = SamplingParams(max_tokens=3, seed=0)
    one = Completion(tokenizer, index=0, prompt_index=0, stop=("c",), params=params)
    for token_id in (97, 256, 101):
        one.push(event(token_id))
    piece = one.take()
    assert piece is not None
    choice = piece.to_json(tokenizer)
    text, placed = choice["text"], ShownTokens().push(choice)
    assert (text, listed(placed)) == ("ab", [(97, 0), (256, 1)])


TOKEN_IDS = st.lists(st.sampled_from([*b"abc", *EURO, 0xC3, 0xFF]), max_size=12)


@given(
    TOKEN_IDS,
    st.lists(st.sampled_from(["a", "bc", "€", "c€", "\ufffd", "abc"]), max_size=2),
    st.lists(st.integers(0, 12)),
    st.binary(max_size=4),
    st.booleans(),
)
def test_lists_are_the_same_whenever_they_are_read(
    token_ids: list[int], stop: list[str], looks: list[int], echo: bytes, ends: bool
) -> None:
    token_ids = token_ids + [END] * ends
    whole = grown(token_ids, *stop, echo=echo)
    assert grown(token_ids, *stop, echo=echo, looks=tuple(looks)) == whole
    text, placed = whole
    offsets = [one.offset for one in placed]
    assert offsets == sorted(offsets)
    everything = [*echo, *token_ids]
    assert [one.token["id"] for one in placed] == everything[: len(placed)]
    if not stop:
        assert len(placed) == len(everything)
    elif len(placed) < len(everything):
        assert all(place < len(text) for place in offsets), "only those that begin in the text"


# The lists


def placed_token(token_id: int, logprob: float | None, *top: tuple[int, float]) -> PlacedToken:
    def one(token_id: int, logprob: float | None) -> dict[str, Any]:
        raw = byte_tokenizer().token_bytes(token_id)
        return {"id": token_id, "text": "", "bytes": list(raw), "logprob": logprob, "rank": 1}

    return PlacedToken({**one(token_id, logprob), "top": [one(*each) for each in top]}, 3)


def test_completion_has_logprob_lists() -> None:
    lists = completion_logprobs(
        byte_tokenizer(),
        [
            placed_token(97, None),
            placed_token(98, -2.5, (99, -0.25), (0xE2, -1.0)),
            placed_token(99, -0.25, (99, -0.25)),
            placed_token(97, -7.0),
        ],
    )
    assert lists == {
        "tokens": ["a", "b", "c", "a"],
        "token_logprobs": [None, -2.5, -0.25, -7.0],
        "top_logprobs": [
            None,
            {"c": -0.25, "bytes:\\xe2": -1.0, "b": -2.5},
            {"c": -0.25},
            {"a": -7.0},
        ],
        "text_offset": [3, 3, 3, 3],
    }


def test_chat_has_a_logprob_list() -> None:
    assert chat_logprobs(byte_tokenizer(), [placed_token(0xE2, -2.5, (99, -0.25))]) == {
        "content": [
            {
                "token": "bytes:\\xe2",
                "logprob": -2.5,
                "bytes": [0xE2],
                "top_logprobs": [{"token": "c", "logprob": -0.25, "bytes": [99]}],
            }
        ],
        "refusal": None,
    }
