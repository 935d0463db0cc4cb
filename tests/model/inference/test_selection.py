"""Indices may select only existing items, and errors state which items exist."""

import pytest

from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.selection import resolve_indices


def test_indices_are_resolved() -> None:
    assert resolve_indices("layers", None, 3, "there are 3 layers") == (0, 1, 2)
    assert resolve_indices("layers", [0, -1], 3, "there are 3 layers") == (0, 2)


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([3], "layers.*3.*0 to 2.*-3 to -1"),
        ([0, -4], "layers.*-4.*3"),
        ([-1, 2], r"layers is \[-1, 2\] \(from the start: \[2, 2\]\)"),
        ([1, 0], "layers.*1, 0"),
        ([], r"layers.*\[\]"),
    ],
)
def test_invalid_indices_are_refused(indices: list[int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        resolve_indices("layers", indices, 3, "there are 3 layers")
    assert caught.value.param == "layers"
