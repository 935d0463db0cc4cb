"""Query: refuses unknown and repeated query parameters, and reads integers in paths and queries
strictly.

Endpoints without query parameters ignore the query: health checks, scrapers and OpenAI's clients
add parameters such as a time or `api-version`.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated

from fastapi import Depends, Request
from fastapi.dependencies.models import Dependant
from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from logitd.model.operations.prompts import clip
from logitd.model.plain_integer import plain_integer
from logitd.service.errors import bad_request


async def _refuse_unknown(request: Request) -> None:
    if not request.scope["query_string"]:
        return
    route = request.scope["route"]
    known = list(_parameters(route.dependant))
    if not known:
        return
    for name, count in Counter(name for name, _ in request.query_params.multi_items()).items():
        if name not in known:
            *others, last = known
            names = f"{', '.join(others)} and {last}" if others else last
            raise bad_request(
                f"unknown query parameter {clip(name)!r}; {request.method} {route.path} accepts "
                f"{names}",
                clip(name),
            )
        if count > 1:
            raise bad_request(
                f"query parameter {name!r} is given {count} times; give it once", name
            )


def _parameters(dependant: Dependant) -> Iterator[str]:
    """The query parameters of a route and of its dependencies."""
    yield from (field.alias for field in dependant.query_params)
    for each in dependant.dependencies:
        yield from _parameters(each)


def _plain_integer(text: str) -> int:
    try:
        return plain_integer(text)
    except ValueError as error:
        message = "Input should be an integer of at most 18 plain digits"
        raise PydanticCustomError("plain_integer", message) from error


PlainInt = Annotated[int, BeforeValidator(_plain_integer)]
"""An integer in a path or a query. pydantic alone would also accept "+1", " 1", "1_0" and "1.0"."""
KNOWN_QUERY = Depends(_refuse_unknown)
"""Dependency of routers whose endpoints take query parameters."""
