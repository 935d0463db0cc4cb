"""Constraints are compiled once, within a time limit, and cached, even if clients disconnect."""

import asyncio
import signal
import threading
from collections.abc import Awaitable, Iterator
from typing import Any

import pytest

from logitd.model.inference.constraints.compiler import (
    Compiler,
    Constraint,
    ConstraintsUnavailable,
    Source,
)
from logitd.model.inference.constraints.sandbox import Sandbox
from logitd.service.engine.admission import Limit
from logitd.service.errors import ApiError
from logitd.service.metrics.metrics import Metrics
from logitd.service.models import constraints as module
from logitd.service.models.constraints import Constraints
from tests.model.factories import byte_tokenizer
from tests.model.inference.constraints.test_sandbox import ROOM, SLOW, trials
from tests.service.serving import TEST_TIMEOUT, eventually

TOKENIZER = byte_tokenizer()
COMPILER = Compiler(TOKENIZER)
SANDBOX = Sandbox(TOKENIZER, memory=ROOM)
GOOD = Source("regex", "[a-z]+")


class WatchedConstraints(Constraints):
    """Constraints that record the source of each trial compilation, and start it only while a gate
    is open."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.tried: list[Source] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def _try(self, source: Source) -> None:
        self.tried.append(source)
        await self.gate.wait()
        await super()._try(source)


class WatchedCompiler(Compiler):
    """A compiler that records the threads that use it."""

    def __init__(self) -> None:
        super().__init__(TOKENIZER)
        self.threads: set[threading.Thread] = set()

    def compile(self, source: Source) -> Constraint:
        self.threads.add(threading.current_thread())
        return super().compile(source)


class Bench:
    """Constraints with their metrics."""

    def __init__(
        self, compiler: Compiler | ConstraintsUnavailable = COMPILER, timeout: float = TEST_TIMEOUT
    ) -> None:
        self.metrics = Metrics()
        self.constraints = WatchedConstraints(
            compiler, SANDBOX, timeout=timeout, metrics=self.metrics.of("tiny")
        )

    def count(self, outcome: str) -> float:
        value = self.metrics.registry.get_sample_value(
            "logitd_constraints_total", {"model": "tiny", "outcome": outcome}
        )
        assert value is not None
        return value

    @property
    def kept(self) -> float | None:
        return self.metrics.registry.get_sample_value("logitd_constraints_kept", {"model": "tiny"})


@pytest.fixture(scope="module", autouse=True)
def closed_sandbox() -> Iterator[None]:
    """Start the sandbox's process once, because a start takes half a second."""
    SANDBOX.start()
    yield
    SANDBOX.close()


def literal(i: int) -> Source:
    return Source("regex", f"text {i}")


async def error_of(work: Awaitable[Constraint]) -> ApiError:
    with pytest.raises(ApiError) as info:
        await work
    return info.value


async def test_equal_sources_are_compiled_once() -> None:
    b = Bench()
    found = await asyncio.gather(*(b.constraints.compiled(GOOD) for _ in range(20)))
    kept = b.constraints.cached(GOOD)
    assert all(one is kept for one in found)
    await b.constraints.compiled(GOOD)
    assert b.constraints.tried == [GOOD]
    assert (b.count("compiled"), b.count("kept"), b.kept) == (20, 2, 1)
    seconds = b.metrics.registry.get_sample_value(
        "logitd_constraint_compile_seconds_count", {"model": "tiny"}
    )
    assert seconds == 1


async def test_kinds_with_the_same_text_are_different() -> None:
    b = Bench()
    text = '["a"]'  # a class of one character, and a choice of one
    as_regex = await b.constraints.compiled(Source("regex", text))
    as_choice = await b.constraints.compiled(Source("choice", text))
    assert as_regex.allowed.nonzero()[0].tolist() == [ord('"'), ord("a")]
    assert as_choice.allowed.nonzero()[0].tolist() == [ord("a")]


async def test_least_recently_used_constraint_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CACHED", 3)
    b = Bench()
    for i in range(3):
        await b.constraints.compiled(literal(i))
    assert b.constraints.cached(literal(0))
    await b.constraints.compiled(literal(3))
    assert b.kept == 3
    assert [bool(b.constraints.cached(literal(i))) for i in range(4)] == [1, 0, 1, 1]


async def test_busy_machine_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit applies to the processor time that a trial uses. If a trial gets no processor time
    for a long time, the client gets 429."""
    b = Bench(timeout=0.2)
    await b.constraints.compiled(literal(0))
    assert SANDBOX._process is not None
    for patience, status in ((20, None), (2, 429)):
        monkeypatch.setattr(module, "PATIENCE", patience)
        SANDBOX._process.send_signal(signal.SIGSTOP)
        waits = asyncio.create_task(error_or_constraint(b.constraints.compiled(literal(1))))
        await asyncio.sleep(0.6)
        SANDBOX._process.send_signal(signal.SIGCONT)
        outcome = await waits
        assert getattr(outcome, "status", None) == status
        b.constraints._cache.clear()


async def test_refusal_has_the_compilers_message_and_is_not_cached() -> None:
    b = Bench()
    wrong = Source("regex", "(")
    for _ in range(2):
        error = await error_of(b.constraints.compiled(wrong))
        assert (error.status, error.param) == (400, "regex")
        assert error.message == "regex: invalid regular expression: unclosed group"
    assert b.constraints.tried == [wrong, wrong]
    assert (b.count("refused"), b.kept) == (2, 0)


async def error_or_constraint(work: Awaitable[Constraint]) -> Constraint | ApiError:
    try:
        return await work
    except ApiError as error:
        return error


async def test_compilations_at_once_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_COMPILING", 3)
    b = Bench()
    b.constraints.gate.clear()
    first = [asyncio.create_task(b.constraints.compiled(literal(i))) for i in range(3)]
    await asyncio.sleep(0)
    error = await error_of(b.constraints.compiled(literal(3)))
    assert (error.status, error.retry_after, error.limit) == (429, 1, Limit.CONSTRAINTS)
    assert b.count("busy") == 1
    same = asyncio.create_task(b.constraints.compiled(literal(0)))
    await asyncio.sleep(0)
    b.constraints.gate.set()
    await asyncio.gather(*first, same)
    assert b.constraints.tried == [literal(i) for i in range(3)]
    assert await b.constraints.compiled(literal(3))


async def test_trial_continues_for_the_remaining_clients() -> None:
    b = Bench()
    b.constraints.gate.clear()
    leaves, stays = (asyncio.create_task(b.constraints.compiled(GOOD)) for _ in range(2))
    while not b.constraints.tried:
        await asyncio.sleep(0.01)
    leaves.cancel()
    await asyncio.wait({leaves})
    b.constraints.gate.set()
    assert await stays
    assert b.constraints.tried == [GOOD]


def slow(i: int) -> Source:
    """A source that takes seconds to compile."""
    return Source(SLOW.kind, SLOW.text + " " * i)


async def test_trial_ends_with_its_last_client() -> None:
    b = Bench()
    clients = [
        asyncio.create_task(b.constraints.compiled(slow(i % 3), f"client {i}")) for i in range(6)
    ]
    while len(b.constraints._trials) < 3:
        await asyncio.sleep(0.01)
    for client in clients[:3]:
        client.cancel()
    await asyncio.wait(clients[:3])
    assert len(b.constraints._compiling) == 3, "each still has a waiting client"
    for client in clients[3:]:
        client.cancel()
    await asyncio.wait(clients)
    assert not b.constraints._compiling
    await asyncio.to_thread(eventually, lambda: not trials(SANDBOX))
    assert await b.constraints.compiled(GOOD)


async def test_new_client_restarts_a_cancelled_compilation() -> None:
    b = Bench()
    b.constraints.gate.clear()
    leaves = asyncio.create_task(b.constraints.compiled(GOOD))
    while not b.constraints.tried:
        await asyncio.sleep(0.01)
    leaves.cancel()
    await asyncio.wait({leaves})
    comes = asyncio.create_task(b.constraints.compiled(GOOD))
    await asyncio.sleep(0.01)
    b.constraints.gate.set()
    assert await comes
    assert b.constraints.tried == [GOOD, GOOD]


@pytest.mark.slow
async def test_slow_constraints_delay_others_only_briefly() -> None:
    """Each of three clients sends slow constraints, one after another."""
    b = Bench(timeout=0.5)
    stop = False

    async def attack(first: int) -> None:
        for i in range(first, 10_000, 3):
            if stop:
                return
            await error_or_constraint(b.constraints.compiled(slow(i), "attacker"))

    attackers = [asyncio.create_task(attack(i)) for i in range(3)]
    await asyncio.sleep(0.5)
    for i in range(8):
        assert await b.constraints.compiled(literal(i), ("attacker", "other")[i % 2])
    stop = True
    await asyncio.wait(attackers)
    assert b.count("timed_out") > 0


async def test_callers_share_the_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_COMPILING", 4)
    b = Bench()
    b.constraints.gate.clear()
    first = [asyncio.create_task(b.constraints.compiled(literal(i), "many")) for i in range(4)]
    await asyncio.sleep(0)
    assert (await error_of(b.constraints.compiled(literal(9), "many"))).status == 429
    first += [asyncio.create_task(b.constraints.compiled(literal(i), "few")) for i in (4, 5)]
    await asyncio.sleep(0)
    assert (await error_of(b.constraints.compiled(literal(9), "few"))).status == 429
    b.constraints.gate.set()
    assert all(await asyncio.gather(*first))


async def test_nothing_is_compiled_on_the_event_loop() -> None:
    compiler = WatchedCompiler()
    b = Bench(compiler)
    await b.constraints.compiled(GOOD)
    assert len(compiler.threads) == 1
    assert threading.current_thread() not in compiler.threads


async def test_without_a_compiler_the_reason_is_given() -> None:
    b = Bench(ConstraintsUnavailable("constraints need llguidance"))
    error = await error_of(b.constraints.compiled(GOOD))
    assert (error.status, error.message) == (400, "regex: constraints need llguidance")
    assert b.constraints.tried == []


async def test_sandbox_starts_in_one_thread_even_if_clients_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sandbox, began, go = Sandbox(TOKENIZER, memory=ROOM), threading.Event(), threading.Event()
    running: list[str] = []
    most = 0

    def start() -> None:
        nonlocal most
        running.append("")
        most = max(most, len(running))
        began.set()
        assert go.wait(TEST_TIMEOUT)
        running.pop()
        raise ConstraintsUnavailable("no sandbox")

    monkeypatch.setattr(sandbox, "start", start)
    constraints = Constraints(COMPILER, sandbox, timeout=1, metrics=Metrics().of("tiny"))
    first = asyncio.create_task(constraints.compiled(GOOD))
    await asyncio.to_thread(began.wait, TEST_TIMEOUT)
    first.cancel()
    began.clear()
    second = asyncio.create_task(constraints.compiled(literal(1)))
    await asyncio.sleep(0.02)
    go.set()
    assert "no sandbox" in (await error_of(second)).message
    assert most == 1
