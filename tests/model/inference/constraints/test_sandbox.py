"""Trial compilations in separate processes: their results are the same as in this process, and
sources that would crash a server end only their trial."""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from logitd.model.inference.constraints.compiler import (
    Compiler,
    ConstraintsUnavailable,
    Kind,
    Source,
)
from logitd.model.inference.constraints.sandbox import (
    ANSWER_BYTES,
    LONG_SECONDS,
    LOWEST_PRIORITY,
    Sandbox,
    TooSlow,
    check,
    request_of,
)
from logitd.model.inference.errors import ConstraintError
from logitd.model.text.tokenizer import SPLIT_PATTERN, Tokenizer
from tests.model.factories import byte_tokenizer
from tests.service.serving import TEST_TIMEOUT, eventually

GOOD = Source("regex", "[a-z]+ [0-9]{2}")
ROOM = 2**30


def tried(sandbox: Sandbox, source: Source, seconds: float = TEST_TIMEOUT) -> None:
    """Try to compile a source. Raises ConstraintError if the source is refused."""
    sandbox.start()
    with sandbox.begin() as trial:
        trial.sendall(request_of(source, seconds))
        try:
            check(trial.recv(ANSWER_BYTES))
        except ConnectionError:  # the trial ended before it had read everything
            check(b"")


def trials(sandbox: Sandbox) -> list[Path]:
    """Directories in /proc of the trials that have not ended."""
    assert sandbox._process is not None
    process = sandbox._process.pid
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [path for child in children if (path := Path(f"/proc/{child}")) and _state(path) != "Z"]


def _state(trial: Path) -> str:
    try:
        return (trial / "stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return "Z"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox(byte_tokenizer())
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def roomy() -> Iterator[Sandbox]:
    """A sandbox whose trials have enough memory for a slow source."""
    sandbox = Sandbox(byte_tokenizer(), memory=ROOM)
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def letters() -> Tokenizer:
    """Ids for three letters and for the end of a document; the other 253 bytes have none."""
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
def sandbox_of_letters(letters: Tokenizer) -> Iterator[Sandbox]:
    sandbox = Sandbox(letters)
    yield sandbox
    sandbox.close()


def brackets(depth: int) -> str:
    """A grammar with a chain of `depth` rules, each of which puts the next in four pairs of
    parentheses. A long chain overflows the stack."""
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
SLOW = Source("json_schema", json.dumps({"anyOf": MULTIPLES, "$defs": {"a": {"$id": "urn:a"}}}))
"""A schema whose compilation fills the memory of `roomy`, after twenty seconds on a fast core. With
the compiler's own bounds it would compile fast, but the compiler adds none to a schema that uses
an inner $id."""


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
def test_sandbox_has_the_errors_of_the_compiler(sandbox: Sandbox, kind: Kind, text: str) -> None:
    source, compiler = Source(kind, text), Compiler(byte_tokenizer())
    expected = None
    try:
        compiler.compile(source)
    except ConstraintError as error:
        expected = str(error)
    found = None
    try:
        tried(sandbox, source)
    except ConstraintError as error:
        found = str(error)
    assert found == expected


def test_sandbox_uses_a_vocabulary_without_all_bytes(
    letters: Tokenizer, sandbox_of_letters: Sandbox
) -> None:
    tried(sandbox_of_letters, Source("regex", "[ab]+"))
    unwritable = Source("regex", "a[0-9]")
    matcher = Compiler(letters).compile(unwritable).matcher()
    matcher.advance(0)
    with pytest.raises(ConstraintError) as here:
        matcher.allowed()
    with pytest.raises(ConstraintError) as there:
        tried(sandbox_of_letters, unwritable)
    assert str(there.value) == str(here.value)


LONG = {"large"}
"""Names of the sources in HOSTILE that take seconds to compile. Here they are compiled only in the
slow set, because a fast test already sends the same sources to a server."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in HOSTILE]
)
def test_sandbox_survives_a_source_that_ends_its_process(sandbox: Sandbox, name: str) -> None:
    with pytest.raises(ConstraintError, match="too large"):
        tried(sandbox, HOSTILE[name])
    tried(sandbox, GOOD)


def test_trial_ends_when_its_socket_is_closed(roomy: Sandbox) -> None:
    roomy.start()
    with roomy.begin() as trial:
        trial.sendall(request_of(SLOW, TEST_TIMEOUT))
        eventually(lambda: len(trials(roomy)) == 1)
        time.sleep(0.3)  # it compiles
    eventually(lambda: not trials(roomy), timeout=5)  # long before it would end by itself
    assert roomy._process is not None
    assert roomy._process.poll() is None
    tried(roomy, GOOD)


def test_long_trial_does_not_block_others(roomy: Sandbox) -> None:
    roomy.start()
    with roomy.begin() as trial:
        trial.sendall(request_of(SLOW, TEST_TIMEOUT))
        eventually(lambda: len(trials(roomy)) == 1)
        time.sleep(2 * LONG_SECONDS)
        (slow,) = trials(roomy)
        assert nice_of(slow) == os.getpriority(os.PRIO_PROCESS, 0)
        tried(roomy, GOOD)
        assert nice_of(slow) == LOWEST_PRIORITY


def nice_of(trial: Path) -> int:
    return int((trial / "stat").read_text().rpartition(") ")[2].split()[16])


def test_sandbox_refuses_a_source_that_fails_at_its_first_tokens(sandbox: Sandbox) -> None:
    source = Source("grammar", 'start: "a" (A | B)\nA: /a/ & /b/\nB: "c" & "d"')
    assert Compiler(byte_tokenizer()).compile(source)
    with pytest.raises(ConstraintError, match="no text matches"):
        tried(sandbox, source)


def test_trial_ends_after_its_own_processor_time(roomy: Sandbox) -> None:
    """The limit counts processor time. So the trial of GOOD succeeds, although it first waits
    longer than the limit for its request."""
    roomy.start()
    with roomy.begin() as waits:
        with pytest.raises(TooSlow):
            tried(roomy, SLOW, seconds=0.5)
        waits.sendall(request_of(GOOD, 0.5))
        check(waits.recv(ANSWER_BYTES))
    eventually(lambda: not trials(roomy))


def test_dead_process_is_restarted() -> None:
    sandbox = Sandbox(byte_tokenizer())
    try:
        sandbox.start()
        assert sandbox._process is not None
        sandbox._process.kill()
        sandbox._process.wait()
        tried(sandbox, GOOD)
    finally:
        sandbox.close()


def test_close_ends_the_process_and_can_be_repeated() -> None:
    sandbox = Sandbox(byte_tokenizer())
    sandbox.close()
    sandbox.start()
    process = sandbox._process
    assert process is not None
    sandbox.close()
    sandbox.close()
    assert process.returncode is not None


def test_sandbox_ends_with_its_parent() -> None:
    """When the parent is killed, its end of the control socket closes."""
    sandbox = Sandbox(byte_tokenizer())
    sandbox.start()
    process, control = sandbox._process, sandbox._control
    assert process is not None
    assert control is not None
    control.close()
    assert process.wait(20) == 0
    sandbox.close()


def test_failing_process_makes_constraints_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConstraintsUnavailable, match="failed to start"):
        Sandbox(byte_tokenizer()).start()
