"""First error: a clause about the first fault that pydantic finds in a file, for messages."""

from pydantic import ValidationError


def first_error(error: ValidationError, of: str = "") -> str:
    """The name of the first wrong value, its value and its rule. `of` follows the name, such as
    " of the tokenizer"."""
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"] if part != "[key]")[:60]
    name = (name or "the document") + of
    if first["type"] == "missing":
        return f"{name} is missing"
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{name} is unknown"
    return f"{name} is {first['input']!r:.100}: {first['msg']}"
