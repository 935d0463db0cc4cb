"""Protocols through which the engine uses constraints. `compiler.py` implements them.

Imports only the standard library. Shapes: V = vocab_size.
"""

from typing import Any, Protocol


class TokenMatcher(Protocol):
    """The progress of one sequence through its constraint."""

    @property
    def complete(self) -> bool:
        """True if no token may follow. Only `allowed` updates this value."""

    def prepare(self) -> bool:
        """True if the matcher is compiled, or takes little time to compile. Otherwise begin to
        compile it in another thread, unless a different matcher is being compiled there."""

    def allowed(self) -> Any:
        """Mask of the next token: read-only NumPy booleans (V,). At least one is true unless the
        matcher is complete. Raises ConstraintError if an incomplete text cannot continue. The first
        call after each token may be slow."""

    def advance(self, token_id: int) -> None:
        """Append an allowed token. May raise ConstraintError if the incomplete text cannot
        continue."""


class TokenConstraint(Protocol):
    """A rule for the token ids of a sequence."""

    @property
    def kind(self) -> str:
        """Name of the request field that holds the constraint."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary that the constraint was compiled for."""

    def matcher(self) -> TokenMatcher:
        """Create a matcher for one more sequence."""
