"""Plural: a number with its noun, for messages."""


def pluralize(count: int, noun: str, form: str = "") -> str:
    """The number, in a format such as ",", and the noun, whose plural ends in s."""
    return f"{count:{form}} {noun}" + ("" if count == 1 else "s")
