"""Generation under constraints: a finished text matches, a truncated text can still become a match,
and other requests are not affected. The oracles are Python's `re` and
`model/inference/reference.py`. The random model favors no token, and its vocabulary splits
characters in odd places, so generation tries everything that the mask allows."""

import dataclasses
import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from logitd.model.inference.constraints import compiler as compiler_module
from logitd.model.inference.constraints.compiler import Compiler, Constraint, Kind, Source
from logitd.model.inference.constraints.protocol import TokenConstraint, TokenMatcher
from logitd.model.inference.engine.events import FinishReason
from logitd.model.inference.engine.requests import GenerationRequest
from logitd.model.inference.errors import ConstraintError, InvalidRequest
from logitd.model.inference.sampling.params import SamplingParams
from tests.model.factories import byte_tokenizer, merging_tokenizer, tiny_config, tiny_gpt
from tests.model.inference.engine.harness import (
    Driven,
    FakeClock,
    Outcome,
    Steps,
    StepsMatcher,
    assert_is_reference,
    generation,
    params,
    run,
    small_gpt,
)
from tests.profiles import examples

TOKENIZER = merging_tokenizer()
COMPILER = Compiler(TOKENIZER)
BYTES = Compiler(byte_tokenizer())
GPT_OF_THE_TESTS = tiny_gpt(
    tiny_config(n_layer=1, n_head=2, d_model=16, vocab_size=TOKENIZER.vocab_size)
)
PROMPT = tuple(b"some text")
ROOM = 128 - len(PROMPT)


def written(constraint: TokenConstraint, seed: int, n: int = 3, **fields: Any) -> list[Outcome]:
    """Outcomes of `n` sequences, each generated until its constraint ends it or the context is
    full."""
    stop = frozenset(COMPILER.ends)
    values: dict[str, Any] = {
        "temperature": 3.0,
        "seed": seed,
        "stop_token_ids": stop,
        "max_tokens": ROOM,
    } | fields
    request = generation("a", PROMPT, n=n, constraint=constraint, **values)
    return list(run(GPT_OF_THE_TESTS, request, slots=n).values())


def written_bytes(outcome: Outcome) -> bytes:
    ids = outcome.token_ids
    assert "<|other|>" not in map(TOKENIZER.token_text, ids)
    return TOKENIZER.decode_bytes([i for i in ids if i != TOKENIZER.end_of_text])


def begins_a_match(source: Source, text: bytes) -> bool:
    """True if a text, read byte by byte, can still become a match. Works for byte vocabularies
    only."""
    matcher = BYTES.compile(source).matcher()
    for byte in text:
        if matcher.complete or not matcher.allowed()[byte]:
            return False
        matcher.advance(byte)
    return True


def check(source: Source, outcome: Outcome) -> str | None:
    """Check a completion by the rules for finished texts or for truncated texts. Return the text if
    it is finished."""
    text = written_bytes(outcome)
    if outcome.ended.reason is FinishReason.STOP:
        return text.decode()  # whole characters
    assert outcome.ended.reason is FinishReason.LENGTH
    assert len(outcome.tokens) == ROOM
    assert begins_a_match(source, text), text
    return None


# Regular expressions

LETTERS = ("a", "b", "é", "€", "😀", "/", '"', r"\.", r"\*", r"\\", r"\n", " ", "-", "<")
CLASSES = ("[a-c]", "[^a]", "[^a-y]", "[0-9]", "[éa]", ".", r"[\]\-]", "[^€-😀]")


def expressions() -> st.SearchStrategy[str]:
    """Expressions that mean the same to Rust's regex and to Python's re."""
    return st.recursive(
        st.sampled_from(LETTERS + CLASSES),
        lambda inner: (
            st.lists(inner, min_size=2, max_size=4).map("".join)
            | st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})")
            | st.tuples(inner, st.sampled_from(["?", "*", "+", "{2}", "{1,3}", "{0,2}"])).map(
                lambda both: f"(?:{both[0]}){both[1]}"
            )
        ),
        max_leaves=8,
    )


@settings(max_examples=examples(100))
@given(expressions(), st.integers(0, 2**32))
def test_text_matches_its_expression(expression: str, seed: int) -> None:
    source = Source("regex", expression)
    for outcome in written(COMPILER.compile(source), seed):
        text = check(source, outcome)
        if text is not None:
            assert re.fullmatch(expression, text), text


# Choices


@settings(max_examples=examples(50))
@given(
    st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=5, unique=True),
    st.integers(0, 99),
)
def test_choices_limit_the_text(texts: list[str], seed: int) -> None:
    source = Source("choice", json.dumps(texts))
    for outcome in written(COMPILER.compile(source), seed):
        assert check(source, outcome) in texts


# Among other requests, and up to the end

SOURCES: dict[Kind, Source] = {
    "regex": Source("regex", r"(ab|c)+ [0-9]{2,9}é"),
    "json_schema": Source(
        "json_schema",
        json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    ),
    "choice": Source("choice", json.dumps(["aba", "abca", "é€"])),
    "grammar": Source("grammar", 'start: A (" " A)*\nA: /[a-c]{2}/ | "é"'),
}
CONSTRAINTS = {kind: COMPILER.compile(source) for kind, source in SOURCES.items()}


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_constrained_text_is_the_references(kind: Kind, temperature: float) -> None:
    for outcome_index, outcome in enumerate(
        written(CONSTRAINTS[kind], seed=1, temperature=temperature)
    ):
        sampling = params(
            ROOM,
            seed=1,
            temperature=temperature,
            constraint=CONSTRAINTS[kind],
            stop_token_ids=frozenset(COMPILER.ends),
        )
        assert_is_reference(GPT_OF_THE_TESTS, PROMPT, sampling, outcome_index, outcome.token_ids)


def test_last_token_may_complete_a_constraint() -> None:
    gpt = small_gpt()
    steps = Steps(gpt.config.vocab_size, length=6)
    for room, reason in ((5, FinishReason.LENGTH), (6, FinishReason.STOP), (7, FinishReason.STOP)):
        outcome = run(gpt, generation("a", [1], max_tokens=room, constraint=steps))["a", 0]
        assert outcome.ended.reason is reason
        assert len(outcome.tokens) == min(room, 6)


def test_end_of_text_ends_a_text_that_could_continue() -> None:
    """`a+` is complete after each letter, so only the end-of-text token ends the text."""
    (end,) = COMPILER.ends
    assert end is not None
    constraint = COMPILER.compile(Source("regex", "(?:ab)+"))
    likely = {"logit_bias": {end: 1000.0}, "temperature": 0.0}
    (outcome,) = written(constraint, seed=0, n=1, **likely)
    assert written_bytes(outcome) == b"ab"
    assert outcome.ended.stop_token_id == end
    unlikely = {"logit_bias": {end: -1000.0}, "temperature": 0.0}
    (outcome,) = written(constraint, seed=0, n=1, **unlikely)
    assert outcome.ended.reason is FinishReason.LENGTH


# Texts that end at the limits of a lexer

with pytest.MonkeyPatch.context() as patched:
    tight = {"max_lexer_states": 300, "step_lexer_fuel": 2000}
    patched.setattr(compiler_module, "LIMITS", {**compiler_module.LIMITS, **tight})
    TIGHT = Compiler(TOKENIZER)


def costly_sources() -> st.SearchStrategy[Source]:
    """Sources whose lexers grow with each token, some of them so fast that the engine ends the
    sequence."""
    growing = st.builds(
        "({}[a-m].{{{}}}[n-z])+".format, st.sampled_from([".*", "[^q]*", "x?"]), st.integers(6, 12)
    )
    return st.one_of(
        growing.map(lambda text: Source("regex", text)),
        growing.map(lambda text: Source("grammar", f"start: A | B\nA: /{text}/\nB: /[a-z]+/")),
        growing.map(
            lambda text: Source("json_schema", json.dumps({"type": "string", "pattern": text}))
        ),
        st.lists(st.text("ab", min_size=9, max_size=40), min_size=1, max_size=40, unique=True).map(
            lambda texts: Source("choice", json.dumps(texts))
        ),
    )


def fates(*requests: GenerationRequest) -> dict[tuple[str, int], tuple[Any, ...]]:
    """Tokens, finish reason and error of each sequence."""
    outcomes = run(GPT_OF_THE_TESTS, *requests, slots=16)
    return {
        key: (outcome.token_ids, outcome.ended.reason, outcome.ended.error)
        for key, outcome in outcomes.items()
    }


def costly(name: str, constraint: Constraint, seed: int, n: int) -> GenerationRequest:
    stop = frozenset(TIGHT.ends)
    fields: dict[str, Any] = {"temperature": 5.0, "max_tokens": 40, "stop_token_ids": stop}
    return generation(name, PROMPT, n=n, seed=seed, constraint=constraint, **fields)


def error_alone(source: Source, token_ids: list[int]) -> tuple[int, str | None]:
    """Number of tokens that a matcher accepts on its own, and its error."""
    matcher, taken = TIGHT.compile(source).matcher(), 0
    try:
        for token_id in token_ids:
            matcher.allowed()
            taken += 1
            matcher.advance(token_id)
        if not matcher.complete:
            matcher.allowed()
    except ConstraintError as error:
        return taken, str(error)
    return taken, None


@settings(max_examples=examples(25, fast=1))
@given(costly_sources(), costly_sources(), st.integers(0, 2**32), st.integers(0, 2**32))
@example(Source("regex", "(.*[a-m].{12}[n-z])+"), Source("regex", "a"), 1, 2)
def test_other_constraints_change_no_outcome(
    source: Source, other: Source, seed: int, others: int
) -> None:
    """A request with one or eight sequences is run alone and alongside requests with the same and
    with other constraints. Its outcomes are always the same."""
    alone = fates(costly("a", TIGHT.compile(source), seed, 8))
    for token_ids, _, error in alone.values():
        assert error_alone(source, token_ids) == (len(token_ids), error)
    shared = TIGHT.compile(source)
    for company in (
        [],
        [costly("same", shared, others, 8)],
        [costly("same", shared, seed, 8), costly("other", TIGHT.compile(other), others, 4)],
    ):
        for n in (8, 1):
            found = fates(*company, costly("a", shared, seed, n))
            assert all(found["a", index] == alone["a", index] for index in range(n))


def test_lexer_limits_apply_to_each_sequence() -> None:
    found = fates(costly("a", TIGHT.compile(Source("regex", "(.*[a-m].{8}[n-z])+")), 1, 16))
    reasons = {reason for _, reason, _ in found.values()}
    assert reasons == {FinishReason.ERROR, FinishReason.LENGTH}


# Masks that take time


@dataclasses.dataclass(frozen=True)
class Slow(Steps):
    """A constraint whose masks take `seconds` each."""

    clock: FakeClock = dataclasses.field(default_factory=FakeClock)
    seconds: float = 0.008

    def matcher(self) -> "SlowMatcher":
        return SlowMatcher(self)


class SlowMatcher(StepsMatcher):
    steps: Slow

    def __init__(self, slow: Slow) -> None:
        super().__init__(slow)
        self.masked = 0  # length of the text for which the mask was computed; the first is ready

    def allowed(self) -> np.ndarray:
        if self.masked < self.place:
            self.masked = self.place
            self.steps.clock.now += self.steps.seconds
        return super().allowed()

    def advance(self, token_id: int) -> None:
        self.place += 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_of_a_step_take_a_bounded_time(temperature: float) -> None:
    """Sequences whose masks do not fit into a step wait in turn, and their tokens are the same.
    Others get a token in each step."""
    gpt, clock = small_gpt(), FakeClock()
    driven = Driven(gpt, clock, slots=16, prefill_chunk=1024)
    slow = Slow(gpt.config.vocab_size, length=9, clock=clock)
    fields: dict[str, Any] = {"max_tokens": 40, "seed": 1, "temperature": temperature}
    driven.add(generation("free", [1, 2], **fields))
    driven.add(generation("slow", [5], n=12, constraint=slow, **fields))
    steps = 0
    while driven.unfinished:
        began = clock.now
        driven.step()
        steps += 1
        assert clock.now - began < 0.04
        count, *of_slow = (len(outcome.tokens) for outcome in driven.outcomes.values())
        assert count == min(steps, 40)
        assert len(of_slow) < 12 or max(of_slow) - min(of_slow) <= 1
    fast = dataclasses.replace(slow, seconds=0.0)
    alone = run(gpt, generation("slow", [5], n=12, constraint=fast, **fields), slots=12)
    for key, outcome in alone.items():
        assert driven.outcomes[key].token_ids == outcome.token_ids


# Matchers that are compiled


@dataclasses.dataclass(frozen=True)
class Compiled(Steps):
    """A constraint whose matchers are ready after they were asked for `asked` times. `begun` holds
    them in the order in which they begin."""

    asked: int = 3
    begun: list["CompiledMatcher"] = dataclasses.field(default_factory=list)

    def matcher(self) -> "CompiledMatcher":
        return CompiledMatcher(self)


class CompiledMatcher(StepsMatcher):
    steps: Compiled

    def __init__(self, steps: Compiled) -> None:
        super().__init__(steps)
        self.asked = 0

    def prepare(self) -> bool:
        if not self.asked:
            self.steps.begun.append(self)
        self.asked += 1
        return self.asked > self.steps.asked

    def allowed(self) -> np.ndarray:
        assert self.asked > self.steps.asked
        return super().allowed()


def test_matchers_are_compiled_for_sequences_with_a_slot() -> None:
    """Others are generated in the meantime, and a text does not depend on it."""
    gpt = small_gpt()
    driven = Driven(gpt, slots=3)
    constraint = Compiled(gpt.config.vocab_size, length=9)
    fields: dict[str, Any] = {"max_tokens": 20, "seed": 1}
    driven.add(generation("free", [1, 2], **fields))
    driven.add(generation("masked", [5], n=6, constraint=constraint, **fields))
    for steps in range(1, constraint.asked + 1):
        driven.step()
        free, *masked = (len(outcome.tokens) for outcome in driven.outcomes.values())
        assert (free, sum(masked), len(constraint.begun)) == (steps, 0, 2)
    while driven.unfinished:
        driven.step()
    assert len(constraint.begun) == 6
    plain = Steps(gpt.config.vocab_size, length=9)
    ready = run(gpt, generation("masked", [5], n=6, constraint=plain, **fields), slots=6)
    for key, outcome in ready.items():
        assert driven.outcomes[key].token_ids == outcome.token_ids


def test_prompt_without_company_waits_for_its_matcher() -> None:
    gpt = small_gpt()
    driven = Driven(gpt, slots=3)
    constraint = Compiled(gpt.config.vocab_size, length=9)
    driven.add(generation("masked", [5], constraint=constraint, max_tokens=20))
    ((_, outcome),) = driven.drain().items()
    assert len(outcome.tokens) == 9


# Failures and refusals


@dataclasses.dataclass(frozen=True)
class Ending(Steps):
    """A constraint whose matchers end after some tokens: they raise `error`, or are complete if
    there is none. They do so when they accept the last token or, if `late`, when the next mask is
    made."""

    after: int = 3
    error: Exception | None = None
    late: bool = False

    def matcher(self) -> TokenMatcher:  # type: ignore[override]
        return EndingMatcher(self)


class EndingMatcher:
    def __init__(self, ending: Ending) -> None:
        self.ending = ending
        self.left = ending.after
        self.complete = False

    def prepare(self) -> bool:
        return True

    def allowed(self) -> np.ndarray:
        if not self.left:
            self.end()
        return np.full(self.ending.vocab_size, self.left > 0)

    def advance(self, token_id: int) -> None:
        self.left -= 1
        if not self.left and not self.ending.late:
            self.end()

    def end(self) -> None:
        if self.ending.error is not None:
            raise self.ending.error
        self.complete = True


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("max_tokens", [3, 20])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (None, (FinishReason.STOP, None, None)),
        (
            ConstraintError("no token may follow"),
            (FinishReason.ERROR, "no token may follow", "steps"),
        ),
        (
            RuntimeError("a bug"),
            (FinishReason.ERROR, "the constraint failed: RuntimeError: a bug", None),
        ),
    ],
)
def test_matcher_ends_its_own_sequence_alone(
    error: Exception | None,
    told: tuple[FinishReason, str | None, str | None],
    max_tokens: int,
    late: bool,
) -> None:
    """The engine may learn of the end only when the next token is due, even if the maximum length
    allows no further token."""
    gpt = small_gpt()
    free = [generation(f"free {i}", [1, 2, i], seed=i, temperature=1.0) for i in range(3)]
    expected = run(gpt, *free)
    ending = Ending(gpt.config.vocab_size, error=error, late=late)
    driven = Driven(gpt)
    ends = generation("ends", [5], n=2, constraint=ending, max_tokens=max_tokens)
    driven.add(free[0], ends, *free[1:])
    outcomes = driven.drain()
    for index in range(2):
        end = outcomes["ends", index].ended
        assert (end.reason, end.error, end.param) == told
        assert end.completion_tokens == len(outcomes["ends", index].tokens) == 3
    for request in free:
        key = (request.request_id, 0)
        assert outcomes[key].tokens == expected[key].tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"allowed_token_ids": (1, 2)}, "allowed_token_ids"), ({"min_tokens": 1}, "min_tokens")],
)
def test_constraint_refuses_fields_that_could_forbid_every_token(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"{param}.*steps") as info:
        SamplingParams(max_tokens=2, seed=0, constraint=Steps(40), **fields)
    assert info.value.param == param


def test_constraint_for_another_vocabulary_is_refused() -> None:
    gpt = small_gpt()
    with pytest.raises(InvalidRequest, match=r"41.*40"):
        run(gpt, generation("a", [1], constraint=Steps(41)))
