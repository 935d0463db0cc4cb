"""Counts with nouns in the singular or plural."""

import pytest

from logitd.model.plural import pluralize


@pytest.mark.parametrize(
    ("count", "form", "words"),
    [
        (0, "", "0 tokens"),
        (1, "", "1 token"),
        (1200, "", "1200 tokens"),
        (1200, ",", "1,200 tokens"),
    ],
)
def test_noun_agrees_with_its_number(count: int, form: str, words: str) -> None:
    assert pluralize(count, "token", form) == words
