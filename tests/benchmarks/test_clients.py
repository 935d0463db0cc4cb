"""What the table of clients says of a check."""

import pytest

from benchmarks.clients import row


@pytest.mark.parametrize(
    ("result", "outcome"),
    [("a text", "works"), (True, "works"), ("", "gave ''"), (False, "gave False"), ([], "gave []")],
)
def test_a_check_works_that_gives_something(result: object, outcome: str) -> None:
    assert row("client 1.0", "asks", lambda: result) == f"| client 1.0 | asks | {outcome} |"


def test_an_error_of_a_client_is_one_cell_of_the_table() -> None:
    def fail() -> None:
        raise ValueError("no | good\nat all")

    assert row("client 1.0", "asks", fail) == "| client 1.0 | asks | ValueError: no / good at all |"
