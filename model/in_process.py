"""Operations of a loaded model, run in this process without a server.

`model/llm.py` converts the results to its types; the server runs the same plans in
`service/engine`.
"""

from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.inference.constraints.compiler import Compiler, ConstraintsUnavailable
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.events import (
    Event,
    FinishEvent,
    FinishReason,
    OutputsChunk,
    TokenEvent,
)
from logitd.model.inference.engine.requests import Request, sequence_lengths
from logitd.model.inference.errors import ConstraintError, InvalidRequest
from logitd.model.operations.all import OPERATIONS
from logitd.model.operations.completion import GrowingReply
from logitd.model.operations.computed import Computed
from logitd.model.operations.operation import Compile, Completions, Compute, Plan, Series, Subject
from logitd.model.operations.validation import parse

SERVER_FIELDS = ("dtype", "model", "prompt_logprobs", "step", "stream", "timeout")
"""Fields of requests that only the server supports."""

COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)
"""Reasons for which a sequence ends with a result."""

BY_NAME = {operation.name: operation for operation in OPERATIONS}


class GenerationError(Exception):
    """Raised if the engine could not finish a sequence; the message gives the reason."""


class Operations:
    """Runs operations on a checkpoint in an engine. Only one thread may use this object, but that
    thread may switch between several generations while it reads them."""

    def __init__(self, engine: Engine, checkpoint: CheckpointInfo) -> None:
        self._engine = engine
        self._checkpoint = checkpoint
        self._mailboxes: dict[str, deque[Event]] = {}  # of unfinished requests

    def plan(self, name: str, /, **fields: Any) -> Plan:
        """Make the plan of a request. If the plan depends on the results of engine requests, those
        requests are computed first."""
        refuse(fields, *SERVER_FIELDS)
        operation = BY_NAME[name]
        body = parse(operation.body, fields)
        planning = operation.plan(body, Subject(self._checkpoint))
        answer: Any = None
        while True:
            try:
                step = planning.send(answer)
            except StopIteration as stop:
                plan: Plan = stop.value
                return plan
            try:
                answer = self._answer(step)
            except InvalidRequest as error:
                planning.throw(error)  # the plan adds the name of the field

    def _answer(self, step: Compute | Compile) -> Any:
        if isinstance(step, Compute):
            return self.compute(step.requests)
        try:
            return Compiler(self._checkpoint.tokenizer).compile(step.source)
        except (ConstraintError, ConstraintsUnavailable) as error:
            kind = step.source.kind
            raise InvalidRequest(f"{kind}: {error}", kind) from error

    def grow(self, growing: GrowingReply, plan: Completions) -> Generator[Event]:
        """Yield the events of a generation, after adding each to `growing`."""
        with closing(self._run(plan.requests)) as events:
            for event in events:
                if not (isinstance(event, FinishEvent) and growing.is_finished(event)):
                    _check(event)
                if growing.push(event):  # the text has reached a stop string
                    assert isinstance(event, TokenEvent)
                    ended = self._engine.abort(event.request_id, event.index, FinishReason.STOP)
                    self._mailboxes[event.request_id].extend(ended)
                yield event

    def compute(self, requests: Sequence[Request]) -> Computed:
        computed = Computed()
        with closing(self._run(requests)) as events:
            for event in events:
                _check(event)
                computed.add(event)
        return computed

    def parts(self, plan: Series) -> list[dict[str, Any]]:
        jobs = list(plan.jobs)
        rows = self.compute(jobs).rows
        parts = (plan.part(Computed(rows={job.request_id: rows[job.request_id]})) for job in jobs)
        return [part for part in parts if part is not None]

    def _run(self, requests: Sequence[Request]) -> Generator[Event]:
        """Yield the events of requests until all have ended. Closing the generator aborts them.

        A step of the engine also computes the requests of other streams. Each stream has a mailbox,
        in which its events are kept until it yields them."""
        mailbox: deque[Event] = deque()
        running = sum(len(sequence_lengths(request)) for request in requests)
        try:
            for request in requests:
                self._engine.add(request)
                self._mailboxes[request.request_id] = mailbox
            while running:
                while not mailbox:
                    self._step()
                event = mailbox.popleft()
                if isinstance(event, OutputsChunk):
                    self._engine.grant(event.request_id)
                elif isinstance(event, FinishEvent):
                    running -= 1
                yield event
        finally:
            for request in requests:
                self._engine.abort(request.request_id)
                self._mailboxes.pop(request.request_id, None)

    def _step(self) -> None:
        """Compute a step. If it is interrupted, for example by KeyboardInterrupt, all streams end,
        because the step may not have computed what the engine has recorded."""
        try:
            events = self._engine.step().events
        except BaseException:
            self._deliver(self._engine.abandon())
            raise
        self._deliver(events)

    def _deliver(self, events: Iterable[Event]) -> None:
        for event in events:
            self._mailboxes[event.request_id].append(event)


def _check(event: Event) -> None:
    """Raise GenerationError if a sequence ended without a result."""
    if isinstance(event, FinishEvent) and event.reason not in COMPLETE:
        raise GenerationError(event.error or event.reason)


def refuse(fields: Mapping[str, Any], *names: str) -> None:
    """Raise InvalidRequest if any of the fields `names` is set."""
    for name in names:
        value = fields.get(name)
        if value is not None and value is not False:
            raise InvalidRequest(f"{name} is not supported by this method; leave it out", name)
