"""Errors of inference that are the request's own fault: what cannot be computed, and why.

The message names the numbers and the way out. What is wrong with a device, a checkpoint or a kernel
is said by the module that notices it.
"""


class InvalidRequest(ValueError):
    """A request that the engine rejects; `param` names the field to change, `request_id` says which
    of several it is, where that is known."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.request_id: str | None = None


class ContextLengthExceeded(InvalidRequest):
    """A text that is too long for the model's context, with what is to follow it."""


class ConstraintError(Exception):
    """A constraint that cannot be compiled, or that lets nothing follow; the message says why."""
