"""Protocol of constraints for the engine, without the compiler (`compiler.py`).

Standard library only, so that requests can cross threads and processes. Shapes: V = vocab_size.
"""

from typing import Any, Protocol


class TokenMatcher(Protocol):
    """The state of one sequence in its constraint."""

    @property
    def complete(self) -> bool:
        """True if nothing may follow. Final only after `allowed`."""

    def allowed(self) -> Any:
        """Mask of the next token: NumPy booleans (V,), which must not be changed. At least one is
        true unless the matcher is complete now. Raises ConstraintError if nothing can follow an
        incomplete text. May take time, once after each token."""

    def advance(self, token_id: int) -> None:
        """Append an allowed token. Raises ConstraintError if it is known at once that nothing can
        follow."""


class TokenConstraint(Protocol):
    """A rule for the token ids of a sequence."""

    @property
    def kind(self) -> str:
        """The request's field."""

    @property
    def vocab_size(self) -> int:
        """Size of its vocabulary."""

    def matcher(self) -> TokenMatcher:
        """A matcher for one more sequence."""
