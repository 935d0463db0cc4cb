"""Query: refuses unknown query parameters, on endpoints that have any.

Other endpoints ignore the query: health checks, scrapers and OpenAI's clients add parameters such
as a time or `api-version`.
"""

from collections.abc import Iterator

from fastapi import Depends, Request
from fastapi.dependencies.models import Dependant

from logitd.model.operations.prompts import clip
from logitd.service.errors import bad_request


async def _refuse_unknown(request: Request) -> None:
    if not request.scope["query_string"]:
        return
    route = request.scope["route"]
    known = list(_parameters(route.dependant))
    for name in request.query_params:
        if known and name not in known:
            raise bad_request(
                f"unknown query parameter {clip(name)!r}; {request.method} {route.path} takes "
                f"{' and '.join(known)}",
                clip(name),
            )


def _parameters(dependant: Dependant) -> Iterator[str]:
    """The query parameters of a route and of its dependencies."""
    yield from (field.alias for field in dependant.query_params)
    for each in dependant.dependencies:
        yield from _parameters(each)


KNOWN_QUERY = Depends(_refuse_unknown)
"""Dependency of routers whose endpoints take query parameters."""
