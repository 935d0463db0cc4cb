"""Constraints without a model: the texts that each kind allows, how the texts end, and which
constraints are refused.

Generation under constraints is tested in `test_constrained.py` of `tests/model/inference/engine/`.
"""

import itertools
import json
import random
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitd.model.convert.vocabulary.words import character_tokenizer
from logitd.model.inference.constraints import compiler as constraint_module
from logitd.model.inference.constraints.compiler import (
    Compiler,
    Constraint,
    ConstraintsUnavailable,
    Kind,
    Matcher,
    Source,
)
from logitd.model.inference.errors import ConstraintError
from logitd.model.text.tokenizer import Tokenizer
from tests.model.factories import byte_tokenizer, merging_tokenizer

BYTES = Compiler(byte_tokenizer())
END = 256
MERGING = merging_tokenizer()
MERGED = Compiler(MERGING)


def compiled(kind: Kind, text: Any, compiler: Compiler = BYTES) -> Constraint:
    """Compile a constraint. A schema or a list of choices is first encoded as JSON."""
    return compiler.compile(Source(kind, text if isinstance(text, str) else json.dumps(text)))


def after(constraint: Constraint, text: str | bytes) -> Matcher:
    """The matcher of a constraint on byte tokens, advanced over a text."""
    matcher = constraint.matcher()
    for byte in text.encode() if isinstance(text, str) else text:
        assert not matcher.complete
        assert matcher.allowed()[byte], f"{bytes([byte])!r} is not allowed"
        matcher.advance(byte)
    return matcher


def takes(constraint: Constraint, text: str | bytes) -> bool:
    """True if the whole text matches."""
    try:
        matcher = after(constraint, text)
    except (AssertionError, ConstraintError):
        return False
    return matcher.complete or bool(matcher.allowed()[END])


def refusal(kind: Kind, text: Any) -> str:
    with pytest.raises(ConstraintError) as info:
        compiled(kind, text)
    return str(info.value)


def walk(constraint: Constraint, seed: int, tokens: int = 60) -> list[int]:
    """Draw ids uniformly from the allowed ids until the constraint is complete."""
    rng, matcher, ids = random.Random(seed), constraint.matcher(), list[int]()
    while not matcher.complete and len(ids) < tokens:
        ids.append(rng.choice(matcher.allowed().nonzero()[0].tolist()))
        matcher.advance(ids[-1])
    return ids


# Kinds of constraints

MATCHES: dict[tuple[Kind, str], tuple[list[str], list[str]]] = {
    ("regex", "ab+c?"): (["ab", "abbbc"], ["a", "xab", "abx", ""]),
    ("regex", r"^\d{2}$"): (["12", "٣٤"], ["1", "123", "a1"]),
    ("regex", "(?i)ja|nein"): (["JA", "Nein"], ["j", "janein"]),
    ("regex", "."): (["é", "😀", "\t"], ["\n", "ab", "é"[:0]]),
    ("regex", "a/b\n\\/"): (["a/b\n/"], ["a/b/"]),
    ("regex", r"\\"): (["\\"], ["\\\\"]),
    ("regex", "a\t\r\nb"): (["a\t\r\nb"], ["ab"]),
    ("regex", "(?x)a # x/y\n\tb\r"): (["ab"], ["a", "a\n\tb\r"]),
    ("regex", "(?x)a\\\\ # \\\n/b # \\"): (["a\\/b"], ["a\\"]),
    ("choice", '["yes", "no", "yes and no"]'): (["yes", "no", "yes and no"], ["yes and", "n", ""]),
    ("choice", '["\\"q\\" \\\\\\\\ \\n\\u007f\\u00e9"]'): (['"q" \\\\ \n\x7fé'], ['"q"']),
    ("choice", '["(a|b)*", "/x/i"]'): (["(a|b)*", "/x/i"], ["a", "x"]),
    ("grammar", 'start: "a" start "b" | "c"'): (["c", "acb", "aacbb"], ["acbb", "ab", "ac"]),
    ("grammar", 'start: WORD (" " WORD)*\nWORD: /[a-z]+/ // words'): (["a", "ab c"], ["a ", "A"]),
    ("json_schema", "{}"): (["null", '{"a": [1, "é"]}', "-1.5"], ["[1,2]", " 1", "{'a': 1}"]),
    ("json_schema", '{"type": "array", "items": {"type": "integer"}, "maxItems": 2}'): (
        ["[]", "[1, -2]"],
        ["[1, 2, 3]", "[1,2]", "[ 1]", "[1.5]", "[1", "[01]"],
    ),
    (
        "json_schema",
        '{"type": "object", "properties": {"a": {"const": null}, "b": {"enum": ["x", 2]}},'
        ' "required": ["b"], "additionalProperties": false}',
    ): (
        ['{"b": 2}', '{"a": null, "b": "x"}'],
        ['{"b": "x", "a": null}', '{"a": null}', '{"b": 2, "c": 1}', '{"b":2}', '{ "b": 2}'],
    ),
    ("json_schema", '{"type": "string", "minLength": 1, "maxLength": 2}'): (
        ['"é"', '"\\n\\""', '"😀a"'],
        ['""', '"abc"', '"\n"', '"\\u0061"', '"\\/"'],
    ),
    ("json_schema", '{"type": "string", "pattern": "^[0-9]+$"}'): (['"12"'], ['""', '"٣"', '"1a"']),
}


@pytest.mark.parametrize(("kind", "text"), MATCHES)
def test_constraint_takes_matches_alone(kind: Kind, text: str) -> None:
    constraint = compiled(kind, text)
    good, bad = MATCHES[kind, text]
    assert [one for one in good if not takes(constraint, one)] == []
    assert [one for one in bad if takes(constraint, one)] == []


def test_property_has_one_spelling() -> None:
    """If a name could be spelled with an escape, it would count as an additional property, and its
    value could have the wrong type."""
    schema = {"properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "integer"}}
    constraint = compiled("json_schema", {"type": "object", **schema})
    assert takes(constraint, '{"a": null, "b": 1}')
    assert not takes(constraint, '{"a": null, "a": 1}')
    assert not takes(constraint, '{"a": null, "\\u0061": 1}')


@pytest.mark.parametrize(("kind", "text"), MATCHES)
def test_tokens_may_split_characters(kind: Kind, text: str) -> None:
    constraint = compiled(kind, text, MERGED)
    bytewise = compiled(kind, text)
    finished = 0
    for seed in range(20):
        ids = walk(constraint, seed)
        written = MERGING.decode_bytes([i for i in ids if i != MERGING.end_of_text])
        if len(ids) < 60:
            written.decode()
            assert takes(bytewise, written)
            finished += 1
        else:
            after(bytewise, written)
    assert finished or text == "{}"


def test_forced_text_has_its_own_tokens() -> None:
    """A forced text is tokenized as usual, not letter by letter."""
    ids = walk(compiled("choice", ["endoftext null"], MERGED), seed=0)
    assert ids == MERGING.encode("endoftext null")
    assert len(ids) < len("endoftext null")


# Ends of texts


def test_end_of_text_is_allowed_after_a_complete_text() -> None:
    constraint = compiled("regex", "ab{1,2}")
    for text, may_end, complete in (("", False, False), ("a", False, False), ("ab", True, False)):
        matcher = after(constraint, text)
        assert (bool(matcher.allowed()[END]), matcher.complete) == (may_end, complete)
    assert after(constraint, "abb").complete


def test_text_that_ended_is_complete() -> None:
    matcher = after(compiled("regex", "a+"), "aa")
    matcher.advance(END)
    assert matcher.complete


@pytest.mark.parametrize("kind_and_text", MATCHES)
def test_special_tokens_are_no_text(kind_and_text: tuple[Kind, str]) -> None:
    special = np.array(sorted(set(MERGING.special_tokens.values()) - {*MERGED.ends}))
    matcher = compiled(*kind_and_text, MERGED).matcher()
    rng = random.Random(0)
    for _ in range(30):
        assert not matcher.allowed()[special].any()
        matcher.advance(rng.choice(matcher.allowed().nonzero()[0].tolist()))
        if matcher.complete:
            break


def test_negation_does_not_reach_special_tokens() -> None:
    allowed = compiled("grammar", 'start: A\nA: ~"x" & /(?s:.*)/', MERGED).matcher().allowed()
    assert allowed[: len(MERGING.ranks)].sum() > 200
    assert allowed[len(MERGING.ranks) :].tolist() == [False, True]  # the end of text


def test_negation_within_an_expression_is_text() -> None:
    constraint = compiled("grammar", 'start: A B ~ 1..2\nA: ~"x" & /(?s:.)/\nB: "~" // ~B')
    assert takes(constraint, "é~~")
    assert not takes(constraint, "x~")
    assert not constraint.allowed[0x80:0xC2].any()


def test_name_of_a_special_token_is_plain_text() -> None:
    name = "<|endoftext|>"
    constraint = compiled("regex", r"<\|endoftext\|>", MERGED)
    ids = walk(constraint, seed=0)
    assert MERGING.decode(ids) == name
    assert not any(map(MERGING.is_special, ids))


@pytest.fixture
def without_end() -> Tokenizer:
    """The byte vocabulary without an end-of-text token."""
    bytes_ = byte_tokenizer()
    return Tokenizer(ranks=bytes_.ranks, pattern=bytes_.pattern, special_tokens={})


def test_vocabulary_without_an_end_of_text(without_end: Tokenizer) -> None:
    compiler = Compiler(without_end)
    constraint = compiled("regex", "ab{1,2}", compiler)
    matcher = constraint.matcher()
    for text, allowed, complete in (("", "a", False), ("a", "b", False), ("b", "b", False)):
        for byte in text.encode():
            matcher.advance(byte)
        assert matcher.allowed().shape == (256,)
        assert bytes(matcher.allowed().nonzero()[0].tolist()) == allowed.encode()
        assert matcher.complete == complete
    matcher.advance(ord("b"))
    assert matcher.complete


def test_published_vocabularys_gaps_are_never_allowed() -> None:
    ranks = byte_tokenizer().ranks
    tokenizer = Tokenizer(ranks=ranks, pattern=".", special_tokens={"<|a|>": 260, "<|b|>": 263})
    allowed = (
        compiled("grammar", 'start: A\nA: ~"x" & /(?s:.*)/', Compiler(tokenizer))
        .matcher()
        .allowed()
    )
    assert allowed.shape == (264,)
    assert not allowed[256:].any()


# Sequences


def test_matchers_of_one_constraint_go_their_own_ways() -> None:
    constraint = compiled("regex", "(ab|cd)+")
    first, second = after(constraint, "ab"), after(constraint, "c")
    assert bytes(first.allowed().nonzero()[0][:-1].tolist()) == b"ac"
    assert bytes(second.allowed().nonzero()[0].tolist()) == b"d"
    assert bytes(constraint.matcher().allowed().nonzero()[0].tolist()) == b"ac"


def test_text_that_leads_nowhere_is_an_error() -> None:
    constraint = compiled("grammar", 'start: "a" (A | B)\nA: /a/ & /b/\nB: "c" & "d"')
    matcher = after(constraint, "a")
    for _ in range(2):  # asking again gives the same answer
        with pytest.raises(ConstraintError, match="no text matches"):
            matcher.allowed()


def test_limit_that_a_text_reaches_by_itself_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        constraint_module, "LIMITS", {**constraint_module.LIMITS, "max_lexer_states": 30}
    )
    constraint = Compiler(byte_tokenizer()).compile(Source("regex", "(a|b)*a(a|b){12}"))
    with pytest.raises(ConstraintError, match="more than 30 states"):
        walk(constraint, seed=1)


def optional_rules(count: int) -> str:
    """A grammar in which any of `count` rules may come next."""
    names = [f"x{i}" for i in range(count)]
    return "\n".join([f"start: {'? '.join(names)}?", *(f"{name}: /[a-z]/" for name in names)])


def test_parser_cost_of_a_text_is_limited() -> None:
    walk(compiled("grammar", optional_rules(100)), seed=1)
    walk(compiled("json_schema", optional_properties(400)), seed=1)
    with pytest.raises(ConstraintError, match="2799 ways to go on, more than 2000"):
        walk(compiled("json_schema", optional_properties(700)), seed=1)
    with pytest.raises(ConstraintError, match="needs more than 5000 items"):
        compiled("grammar", optional_rules(300), MERGED)


def optional_properties(count: int) -> dict[str, Any]:
    named = {f"k{i}": {"type": "string", "maxLength": i} for i in range(count)}
    return {"type": "object", "properties": named}


@pytest.mark.parametrize("source", [("regex", "(ab|b)+"), ("choice", ["a", "abc"])])
def test_slow_matchers_are_compiled_one_after_another_in_a_thread(
    source: tuple[Kind, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick, slow = compiled(*source), compiled(*source)
    quick.is_quick, slow.is_quick = True, False
    assert quick.matcher().prepare()
    compiler, may_compile = slow.compiler, threading.Event()

    def when_allowed(*arguments: Any) -> Any:
        assert may_compile.wait(60)
        assert threading.current_thread() is not threading.main_thread()
        return type(compiler).matcher(compiler, *arguments)

    monkeypatch.setattr(compiler, "matcher", when_allowed)
    first, second = slow.matcher(), slow.matcher()
    assert not first.prepare()
    assert not second.prepare()
    assert second._start is None
    may_compile.set()
    for matcher in (first, second):
        while not matcher.prepare():
            time.sleep(0.001)
        with pytest.raises(ConstraintError):
            matcher.advance(ord("z"))
    monkeypatch.undo()
    assert [walk(slow, seed) for seed in range(9)] == [walk(quick, seed) for seed in range(9)]


# Refusals

REFUSED: list[tuple[Kind, Any, str]] = [
    ("regex", "(", "unclosed group"),
    ("regex", "(?=a)a", "look-around"),
    ("regex", r"(a)\1", "backreferences"),
    ("regex", r"\bab", "lookarounds"),
    ("regex", "a\\", "unrecognized escape"),
    ("regex", "a\\\nb", "unrecognized escape"),
    ("regex", "", "empty"),
    ("regex", "(|a{0})", "empty"),
    ("regex", "(" * 5000, "unclosed group"),
    ("json_schema", {"type": "objekt"}, "objekt"),
    ("json_schema", {"$ref": "#"}, "no text matches"),
    ("json_schema", {"$ref": "http://localhost/schema"}, "retriever"),
    ("json_schema", {"$ref": "file:///etc/passwd"}, "retriever"),
    ("json_schema", {"type": "string", "format": "shoe-size"}, "shoe-size"),
    ("json_schema", {"type": "string", "minLength": 2, "maxLength": 1}, "Unsatisfiable"),
    ("json_schema", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "use anyOf, or"),
    ("json_schema", {"enum": []}, "Unsatisfiable"),
    ("json_schema", {"type": "array", "uniqueItems": True}, "uniqueItems"),
    ("grammar", "start: b", 'at 1(8): unknown name: "b"'),
    ("grammar", 'begin: "a"', "start rule"),
    ("grammar", "start: A\nA: /(/", "at 2(4): "),
    ("grammar", '{"grammars": [{"json_schema": {}}]}', "statement"),
    ("grammar", 'start: "a" <|endoftext|>', "<|endoftext|>"),
    ("grammar", 'start: "<" <[256]>', "<[256]>"),
    ("grammar", "start: <[*]>", "<[*]>"),
    ("grammar", "start: A\nA: ~/a/", "not UTF-8"),
    ("grammar", "start: A\nA: /b/ | ~ B\nB: /a/", "not UTF-8"),
    ("grammar", 'start: A\nA: ~"a" & ~/b/', "not UTF-8"),
    ("grammar", "start: a\na[temperature=0.5]: /b/", "temperature"),
    ("grammar", 'start: /a\n"/ %json {"type": "null"}', "%json"),
    ("grammar", 'start: a\n?a [ lazy, stop="]:" ]: /b/', "stop"),
    ("grammar", "start: a\na[capture]: /b/", "capture"),
    ("grammar", f'start: "a" b\nb: {"c? " * 20_000}\nc: "d"', "limit for this grammar: 10000"),
]


@pytest.mark.parametrize(("kind", "text", "words"), REFUSED)
def test_compiler_refuses_in_one_line(kind: Kind, text: Any, words: str) -> None:
    message = refusal(kind, text)
    assert words in message
    assert len(message) <= 300
    assert "\n" not in message
    assert not any(own in message for own in (".rs", "limits.", "non-verbose", "/root"))


def test_grammar_text_that_looks_like_a_special_token_is_accepted() -> None:
    lark = 'start: "<[1]>" X // temperature=1\nX: /[<>]{2}/ # <|endoftext|>\n'
    assert takes(compiled("grammar", lark), "<[1]><>")


def test_long_message_takes_no_time() -> None:
    """Work that grows with the square of the length would take minutes."""
    began = time.process_time()
    assert len(constraint_module._readable("at 1(8): " + "(" * 500_000)) == 300
    assert time.process_time() - began < 5


def test_constraints_are_unavailable_without_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConstraintsUnavailable, match="llguidance"):
        Compiler(byte_tokenizer())


def test_importing_the_module_does_not_import_llguidance() -> None:
    module = "logitd.model.inference.constraints.compiler"
    code = f"import {module}, sys; sys.exit('llguidance' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# Vocabularies that lack bytes


CHARACTERS = character_tokenizer(dict(enumerate(["<pad>", *'abc {}:"1\n', "é"])))


@given(st.data())
def test_masks_of_characters_match_the_expression(data: st.DataObject) -> None:
    """In a vocabulary of characters, forced text is forced one character at a time."""
    middles = ("".join(m) for length in range(4) for m in itertools.product("cé", repeat=length))
    language = [f"ab{middle}b\n\n1" for middle in middles]
    constraint = Compiler(CHARACTERS).compile(Source("regex", r"ab(c|é){0,3}b\n{2}1"))
    matcher, text = constraint.matcher(), ""
    while not matcher.complete:
        ids = matcher.allowed().nonzero()[0].tolist()
        following = {whole[len(text)] for whole in language if whole.startswith(text)}
        assert {CHARACTERS.token_text(token_id) for token_id in ids} == following
        token_id = data.draw(st.sampled_from(ids))
        matcher.advance(token_id)
        text += CHARACTERS.token_text(token_id)
    assert text in language


def test_text_that_needs_a_character_too_many_is_refused() -> None:
    with pytest.raises(ConstraintError, match="no text matches"):
        Compiler(CHARACTERS).compile(Source("regex", "Zebra"))
    matcher = Compiler(CHARACTERS).compile(Source("choice", '["abz"]')).matcher()
    matcher.advance(1)
    matcher.allowed()
    matcher.advance(2)
    with pytest.raises(ConstraintError, match="no text matches"):
        matcher.allowed()


def test_model_of_token_ids_alone_has_no_constraints() -> None:
    with pytest.raises(ConstraintsUnavailable, match="allowed_token_ids"):
        Compiler(Tokenizer.without_text(5))
