"""The process in which constraints are compiled first: it says what compiling here would say, and
takes upon itself what would end a server.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from logitd.model.inference.constraints import sandbox as constraint_check
from logitd.model.inference.constraints.compiler import (
    Compiler,
    ConstraintsUnavailable,
    Kind,
    Source,
)
from logitd.model.inference.constraints.sandbox import Checker
from logitd.model.inference.errors import ConstraintError
from logitd.model.text.tokenizer import SPLIT_PATTERN, Tokenizer
from tests.model.factories import byte_tokenizer

GOOD = Source("regex", "[a-z]+ [0-9]{2}")


@pytest.fixture(scope="module")
def checker() -> Iterator[Checker]:
    checker = Checker(byte_tokenizer())
    yield checker
    checker.close()


@pytest.fixture(scope="module")
def letters() -> Tokenizer:
    """Ids for three letters and what ends a document; the other 253 bytes have none."""
    ranks = {letter: rank for rank, letter in enumerate((b"a", b"b", b"c"))}
    missing = (byte for byte in map(bytes, zip(range(256))) if byte not in ranks)
    ranks |= {byte: 4 + index for index, byte in enumerate(missing)}
    return Tokenizer(
        ranks=ranks,
        pattern=SPLIT_PATTERN,
        special_tokens={"<|end|>": 3},
        vocab_size=4,
        end_of_text_name="<|end|>",
    )


@pytest.fixture(scope="module")
def checker_of_letters(letters: Tokenizer) -> Iterator[Checker]:
    checker = Checker(letters)
    yield checker
    checker.close()


def brackets(depth: int) -> str:
    """A chain of rules that each stand in brackets: more than a stack holds."""
    rules = "".join(f"r{i}: ((((r{i + 1}))))\n" for i in range(depth))
    return f'start: r0\n{rules}r{depth}: "a"'


# Compiling these in the process of the tests would end it, or them.
HOSTILE: dict[str, Source] = {
    "deep": Source("grammar", brackets(1000)),
    "large": Source("regex", ".?" * 8000),
    "references": Source(
        "json_schema",
        json.dumps(
            {
                "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1000)}
                | {"d1000": {"type": "null"}},
                "$ref": "#/$defs/d0",
            }
        ),
    ),
}
MULTIPLES = [{"type": "integer", "multipleOf": 99_991 - i} for i in range(10)]
SLOW = Source("json_schema", json.dumps({"allOf": [{"anyOf": MULTIPLES}]}))
"""Takes four seconds on a fast core, until it has reached the bound of memory; with more multiples
it would reach that sooner. With allOf it gets no bounds of ours, which would make it fast."""


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(ab)+"),
        ("regex", "("),
        ("choice", '["é", "\\u0000"]'),
        ("json_schema", '{"type": "object"}'),
        ("json_schema", '{"type": "objekt"}'),
        ("grammar", 'start: "a" b'),
    ],
)
def test_sandbox_says_what_the_compiler_says(checker: Checker, kind: Kind, text: str) -> None:
    source, compiler = Source(kind, text), Compiler(byte_tokenizer())
    expected = None
    try:
        compiler.compile(source)
    except ConstraintError as error:
        expected = str(error)
    found = None
    try:
        checker.check(source)
    except ConstraintError as error:
        found = str(error)
    assert found == expected


def test_vocabulary_that_lacks_bytes_is_the_same_there(
    letters: Tokenizer, checker_of_letters: Checker
) -> None:
    checker_of_letters.check(Source("regex", "[ab]+"))
    unwritable = Source("regex", "a[0-9]")
    matcher = Compiler(letters).compile(unwritable).matcher()
    matcher.advance(0)
    with pytest.raises(ConstraintError) as here:
        matcher.allowed()
    with pytest.raises(ConstraintError) as there:
        checker_of_letters.check(unwritable)
    assert str(there.value) == str(here.value)


LONG = {"large"}
"""Takes seconds. The fast tests ask it of a server."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in HOSTILE]
)
def test_sandbox_survives_a_source_that_ends_its_process(checker: Checker, name: str) -> None:
    with pytest.raises(ConstraintError, match="too large"):
        checker.check(HOSTILE[name])
    checker.check(GOOD)


def test_sandbox_check_can_be_killed(checker: Checker) -> None:
    checker.start()
    timer = threading.Timer(0.3, checker.kill)
    timer.start()
    began = time.monotonic()
    with pytest.raises(ConstraintError):
        checker.check(SLOW)
    assert time.monotonic() - began < 20
    timer.join()
    checker.check(GOOD)


def test_sandbox_refuses_a_source_that_fails_at_its_first_tokens(checker: Checker) -> None:
    """The source compiles, and no text of it can be written."""
    source = Source("grammar", 'start: "a" (A | B)\nA: /a/ & /b/\nB: "c" & "d"')
    assert Compiler(byte_tokenizer()).compile(source)
    with pytest.raises(ConstraintError, match="no text matches"):
        checker.check(source)


def test_memory_is_told_and_a_process_that_has_grown_is_replaced() -> None:
    checker = Checker(byte_tokenizer())
    try:
        checker.check(GOOD)
        first = checker._process
        checker.check(GOOD)
        assert checker._process is first
        assert first is not None
        grown = checker.check(Source("regex", "(a{100}){1000}"))
        assert grown > constraint_check.GROWN_BYTES
        assert first.poll() is not None
        assert checker.check(GOOD) < 2**20
        assert checker._process is not first
    finally:
        checker.close()


def test_process_that_died_meanwhile_is_started_again() -> None:
    checker = Checker(byte_tokenizer())
    try:
        checker.start()
        assert checker._process is not None
        checker._process.kill()
        checker._process.wait()
        checker.check(GOOD)
    finally:
        checker.close()


def test_closing_ends_the_process_and_is_harmless_twice() -> None:
    checker = Checker(byte_tokenizer())
    checker.close()
    checker.start()
    process = checker._process
    assert process is not None
    checker.close()
    checker.close()
    assert process.returncode is not None


def test_sandbox_ends_with_its_parent() -> None:
    checker = Checker(byte_tokenizer())
    checker.start()
    process = checker._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(20) == 0
    checker.close()


def test_process_that_does_not_start_makes_constraints_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConstraintsUnavailable, match="does not start"):
        Checker(byte_tokenizer()).check(GOOD)
