"""Plural: a number with its noun, for messages."""


def pluralize(count: int, noun: str, form: str = "") -> str:
    """A number, in the format `form` such as ",", and its noun, with an s unless it is 1."""
    return f"{count:{form}} {noun}" + ("" if count == 1 else "s")
