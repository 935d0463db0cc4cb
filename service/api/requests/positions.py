"""Positions: which positions of a prompt a body chooses."""

from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.selection import resolve_indices
from logitd.service.schemas.base import PositionChoice, PositionRange


def resolve_positions(positions: PositionChoice, length: int) -> tuple[int, ...]:
    """The positions that a body chooses of a prompt with `length` tokens, ascending. Raises
    InvalidRequest for those that there are not."""
    if not length:
        return ()  # validation rejects an empty prompt
    match positions:
        case "last":
            return (length - 1,)
        case "all":
            return tuple(range(length))
        case PositionRange():
            within = tuple(range(length)[positions.start : positions.to])
            if not within:
                raise InvalidRequest(
                    f"there are no positions from {positions.start} to {positions.to} in a prompt "
                    f"of {length} tokens; `to` is the first position left out",
                    "positions",
                )
            return within
        case _:
            return resolve_indices(
                "positions", positions, length, f"the prompt has {length} tokens"
            )
