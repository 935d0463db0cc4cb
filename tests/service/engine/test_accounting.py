"""AsyncEngine counts the output elements of a request until the request ends, however it ends."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from logitd.model.inference.engine.cost import output_elements
from logitd.model.inference.engine.requests import Request, sequence_lengths
from logitd.model.inference.errors import InvalidRequest
from logitd.service.engine.admission import QueueFull
from logitd.service.engine.async_engine import AsyncEngine
from logitd.service.engine.driver import StepReport
from logitd.service.engine.session import EngineSession
from logitd.service.engine.submission import Submission
from tests.service.engine.harness import (
    TINY,
    all_rows,
    finishes,
    generation,
    prompt_logprobs,
    reserved,
    rest,
    running,
    scores,
    tiny,
)

ELEMENTS_LIMIT = 100 * 257


COMMANDS = ("rows", "scores", "prompt logprobs", "generation", "too late", "reserve", "next",
            "release", "abort", "take", "go on")  # fmt: skip


class Account:
    """Sends requests to an AsyncEngine and tracks the engine's open elements: those that are
    reserved, and those that belong to requests with unfinished sequences."""

    def __init__(self, owner: AsyncEngine, reports: list[StepReport]) -> None:
        self.owner, self.reports = owner, reports
        self.submissions: list[Submission] = []
        self.submitted: list[Request] = []
        self.reservations: list[tuple[EngineSession, list[Request]]] = []
        self.names = 0

    def check(self) -> None:
        ended = Counter(e.request_id for r in self.reports for e in finishes(list(r.events)))
        left = [r for r in self.submitted if ended[r.request_id] < len(sequence_lengths(r))]
        left += [request for _, waiting in self.reservations for request in waiting]
        assert self.owner.admission.elements == price(left)

    async def do(self, command: str, size: int) -> None:
        match command:
            case "reserve":
                self.reserve([self.request("rows", 1 + size // 2) for _ in range(3)])
            case "next":
                for reservation, waiting in self.reservations:
                    if waiting:
                        self.submissions.append(reservation.submit_next())
                        self.submitted.append(waiting.pop(0))
            case "release":
                self.release()
            case "abort":
                for submission in self.submissions[-2:]:
                    submission.abort()
            case "take":
                for submission in self.submissions:
                    await submission.take(timeout=0)
            case "go on":
                await asyncio.sleep(0.001)
            case _:
                self.submit(self.request(command, size))

    def request(self, command: str, size: int) -> Request:
        self.names += 1
        name = f"{self.names:03}"
        match command:
            case "scores":
                return scores(name, size, 1 + size // 2)
            case "prompt logprobs":
                return prompt_logprobs(name, size, n=2)
            case "generation":
                return generation(name, size, n=2)
            case "too late":
                return replace(all_rows(name, size), deadline=self.owner.now())
            case _:
                return all_rows(name, size)

    def submit(self, request: Request) -> None:
        if self.fits([request], lambda: self.submissions.append(self.owner.submit([request]))):
            self.submitted.append(request)

    def reserve(self, requests: list[Request]) -> None:
        def reserve() -> None:
            self.reservations.append((reserved(self.owner, requests), requests))

        self.fits(requests, reserve)

    def fits(self, requests: list[Request], ask: Callable[[], None]) -> bool:
        """Send a request. Returns True if it was accepted, which it must be if there is room."""
        elements, wanted = price(requests), price(requests) + self.owner.admission.elements
        try:
            ask()
        except InvalidRequest:
            assert elements > ELEMENTS_LIMIT
        except QueueFull:
            assert elements <= ELEMENTS_LIMIT < wanted
        else:
            assert self.owner.admission.elements == wanted <= ELEMENTS_LIMIT
            return True
        assert self.owner.admission.elements == wanted - elements, "all or none"
        return False

    def release(self) -> None:
        for reservation, waiting in self.reservations:
            reservation.close()
            waiting.clear()


def price(requests: list[Request]) -> int:
    return sum(output_elements(request, TINY.config) for request in requests)


@given(
    st.lists(st.tuples(st.sampled_from(COMMANDS), st.integers(1, 70)), max_size=20),
    st.sampled_from(["read", "abort", "stop"]),
)
def test_elements_are_counted_until_their_request_ends(
    commands: list[tuple[str, int]], end: str
) -> None:
    async def test() -> None:
        async with running(
            tiny(slots=2),
            max_queue_tokens=10**6,  # so that only elements can be too many
            max_queue_elements=ELEMENTS_LIMIT,
            drain_timeout=0,
        ) as (owner, reports):
            account = Account(owner, reports)
            for command, size in commands:
                await account.do(command, size)
                account.check()
            if end == "stop":
                await owner.stop(0)
                account.check()
            account.release()
            for submission in account.submissions:
                if end == "abort":
                    submission.abort()
                await rest(submission)
                account.check()
            assert owner.admission.elements == 0

    asyncio.run(test())
