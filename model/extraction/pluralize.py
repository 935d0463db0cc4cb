"""Pluralize: a count with its noun, as people write it."""


def pluralize(count: int, noun: str) -> str:
    """1 token, 2 tokens, 1,000 tokens."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
