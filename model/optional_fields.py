"""Optional fields: makes fields of a pydantic model from the fields of a dataclass, so that they
are declared only once.

The annotation of each field of the dataclass contains its description and limits: `Annotated[int,
Field(ge=1, description="blocks")]`.
"""

from collections.abc import Iterable
from typing import Annotated, Any, get_args, get_type_hints

from pydantic import BaseModel, create_model


def with_optional_fields(
    base: type[BaseModel], dataclass: type, names: Iterable[str]
) -> type[BaseModel]:
    """Make a pydantic model that has the fields of `base`, then the named fields of a dataclass,
    which are None by default."""
    hints = get_type_hints(dataclass, include_extras=True)
    kinds = {name: get_args(hints[name]) for name in names}
    fields: dict[str, Any] = {
        name: (Annotated[kind | None, *metadata], None) for name, (kind, *metadata) in kinds.items()
    }
    return create_model(f"{base.__name__}With{dataclass.__name__}", __base__=base, **fields)
