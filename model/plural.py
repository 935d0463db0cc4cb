"""Plural: a number with its noun, for messages."""


def pluralize(count: int, noun: str, form: str = "") -> str:
    """A number and its noun, with an s unless the number is 1. `form` is the number's format, such
    as ","."""
    return f"{count:{form}} {noun}" + ("" if count == 1 else "s")
