"""Masks computed beside the model: the same texts, on another thread, and nothing left behind."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from logitd.model.inference.constraints.compiler import Compiler, Source
from logitd.model.inference.constraints.mask_worker import ENOUGH, MaskWorker
from logitd.model.inference.constraints.protocol import TokenConstraint
from logitd.model.inference.errors import ConstraintError
from tests.model.factories import byte_tokenizer, tiny_config, tiny_gpt
from tests.model.inference.engine.harness import Driven, Outcome, generation, run, small_gpt

COMPILER = Compiler(byte_tokenizer())
SOURCES = (
    Source("regex", "(ab|c)*x?"),
    Source("choice", json.dumps(["yes", "no", "now", "never again"])),
    Source("json_schema", json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})),
    Source("grammar", 'start: "ab" (A | B)\nA: /a/ & /b/\nB: "c" & "d"'),  # leads nowhere
)


@pytest.fixture
def worker() -> Iterator[MaskWorker]:
    looking = MaskWorker()
    yield looking
    looking.close()


def texts(**config: Any) -> dict[tuple[str, int], Outcome]:
    """Texts of sequences under four constraints, and of one that is free."""
    gpt = tiny_gpt(tiny_config(n_layer=1, n_head=2, d_model=16, vocab_size=COMPILER.vocab_size))
    constrained = [
        generation(
            source.kind,
            b"some text",
            n=ENOUGH // 4,
            seed=index,
            temperature=3.0,
            max_tokens=40,
            constraint=COMPILER.compile(source),
        )
        for index, source in enumerate(SOURCES)
    ]
    free = generation("free", b"some text", max_tokens=40)
    return run(gpt, *constrained, free, slots=ENOUGH + 1, **config)


def test_mask_worker_changes_no_token_and_no_end(worker: MaskWorker) -> None:
    def told(outcomes: dict[tuple[str, int], Outcome]) -> dict[tuple[str, int], Any]:
        return {
            key: (one.token_ids, one.ended.reason, one.ended.error) for key, one in outcomes.items()
        }

    assert told(texts(masks=worker)) == told(texts())


class Witness:
    """A matcher that lets everything follow, and remembers who asked."""

    complete = False

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked_by: list[str] = []

    def allowed(self) -> np.ndarray:
        self.asked_by.append(threading.current_thread().name)
        if self.error is not None:
            raise self.error
        return np.ones(40, dtype=bool)

    def advance(self, token_id: int) -> None:
        """Accept any token."""


def test_mask_worker_asks_many_matchers_and_not_few(worker: MaskWorker) -> None:
    many, few = ([Witness() for _ in range(count)] for count in (ENOUGH, ENOUGH - 1))
    worker.begin(many)()
    worker.begin(few)()
    assert [one.asked_by for one in many] == [["logitd-masks"]] * len(many)
    assert not any(one.asked_by for one in few)


def test_mask_worker_leaves_a_failure_to_the_next_question(worker: MaskWorker) -> None:
    failing = [Witness(error) for error in (ConstraintError("no"), RuntimeError("a bug"))]
    rest = [Witness() for _ in range(ENOUGH)]
    worker.begin([*failing, *rest])()
    assert all(one.asked_by == ["logitd-masks"] for one in rest)
    worker.begin(rest)()
    assert all(len(one.asked_by) == 2 for one in rest)


class Shared:
    """A constraint whose matchers the test can see."""

    kind = "shared"
    vocab_size = 40

    def __init__(self) -> None:
        self.matchers: list[Witness] = []

    def matcher(self) -> Witness:
        self.matchers.append(Witness())
        return self.matchers[-1]


def test_step_that_fails_waits_for_those_that_are_asked(
    worker: MaskWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without that, the thread would work on matchers of sequences that are gone, and the next step
    would take its answers for another step's."""
    gpt, shared = small_gpt(), Shared()
    constraint: TokenConstraint = shared
    driven = Driven(gpt, masks=worker, slots=2 * ENOUGH)
    driven.add(generation("a", [1, 2], n=ENOUGH, constraint=constraint, max_tokens=90))
    while driven.step().decoded_sequences < ENOUGH:
        assert driven.engine.has_work()

    def fail(hidden: Any) -> Any:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as failing:
        failing.setattr(gpt, "logits", fail)
        driven.step()
    driven.add(generation("b", [3, 4], n=ENOUGH, constraint=constraint, max_tokens=9))
    outcomes = driven.drain()
    for index in range(ENOUGH):
        assert outcomes["a", index].ended.error == "the model failed: RuntimeError: out of luck"
        assert len(outcomes["b", index].token_ids) == 9
    assert worker._done.empty()


def test_closing_ends_the_thread() -> None:
    before = set(threading.enumerate())  # servers of other tests have such threads too
    looking = MaskWorker()
    assert {thread.name for thread in set(threading.enumerate()) - before} == {"logitd-masks"}
    looking.close()
    assert set(threading.enumerate()) <= before
