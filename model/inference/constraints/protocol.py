"""What the engine knows of a constraint: its shape, not how it is compiled (`compiler.py`).

Standard library only, so that requests can cross threads and processes. Shapes: V = vocab_size.
"""

from typing import Any, Protocol


class TokenMatcher(Protocol):
    """How far one sequence has come in its constraint."""

    @property
    def complete(self) -> bool:
        """Whether nothing may follow, as far as that is known: `allowed` knows."""

    def allowed(self) -> Any:
        """Which ids may come next: a NumPy array of booleans (V,), not to be changed. At least one
        of them is true, unless the matcher is complete now. Raises ConstraintError when nothing can
        follow and the text is not whole. May take time, once after each token."""

    def advance(self, token_id: int) -> None:
        """Take in a token that was allowed. Raises ConstraintError when nothing can follow it and
        that is known at once."""


class TokenConstraint(Protocol):
    """What the token ids of a sequence have to be, one after the other."""

    @property
    def kind(self) -> str:
        """The field of a request that it comes from."""

    @property
    def vocab_size(self) -> int:
        """The vocabulary that it was made for."""

    def matcher(self) -> TokenMatcher:
        """The matcher of one more sequence."""
