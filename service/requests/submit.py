"""Queueing: requests handed to the engine, and its refusals as the client sees them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from model.inference.engine.requests import Request
from model.inference.errors import InvalidRequest
from service.core.errors import ApiError, bad_request, from_invalid, unavailable
from service.core.state import Served
from service.engine.admission import QueueFull
from service.engine.async_engine import Reservation
from service.engine.submission import EngineStopped, Submission


@contextmanager
def engine_refusals() -> Iterator[None]:
    """The engine's refusals as the client sees them: ApiError in place of what is raised within."""
    try:
        yield
    except InvalidRequest as error:
        raise from_invalid(error) from error
    except QueueFull as error:
        raise ApiError(
            429,
            "rate_limit_error",
            f"{error}; try again in about {error.retry_after} s",
            None,
            "queue_full",
            error.retry_after,
        ) from error
    except EngineStopped as error:
        raise unavailable(str(error)) from error


def submit(served: Served, requests: Sequence[Request]) -> Submission:
    """Queue requests, or raise the ApiError that says why not."""
    with engine_refusals():
        return served.engine.submit(requests)


def reserve(served: Served, requests: Sequence[Request]) -> Reservation:
    """Room for requests that run one after the other, or the ApiError that says why not."""
    with engine_refusals():
        return served.engine.reserve(requests)


def submit_next(reservation: Reservation) -> Submission:
    """Queue the next request of a reservation."""
    with engine_refusals():
        return reservation.submit_next()


def check_room(sequences: int, param: str, served: Served) -> None:
    """Refuse more sequences than one request may have, or than there is room for now."""
    _check_sequences(sequences, param, served)
    with engine_refusals():
        served.engine.check_room(sequences)


def deadline_of(timeout: float | None, served: Served) -> float | None:
    return None if timeout is None else served.engine.now() + timeout


def _check_sequences(count: int, param: str, served: Served) -> None:
    settings = served.settings
    if count > settings.max_sequences:
        raise bad_request(
            f"the request has {count} sequences (prompts times n); {settings.max_sequences} are "
            "allowed in one. Send less, or raise --max-sequences",
            param,
        )
    if count > served.slots + settings.max_queue:
        raise bad_request(
            f"the request has {count} sequences (prompts times n); {served.slots} slots and a "
            f"queue of {settings.max_queue} never have room for so many. Send less, or raise "
            "--max-queue",
            param,
        )
