"""Amounts: a count with its noun, for people."""


def counted(count: int, noun: str) -> str:
    """1 token, 2 tokens, 1,000 tokens."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
