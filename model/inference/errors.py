"""Errors that a request causes. Messages name the field, the numbers and the fix.

Errors of devices, checkpoints and kernels are defined in the modules that raise them.
"""


class InvalidRequest(ValueError):
    """A refused request.

    param       name of the field to change
    code        error code for programs, from a fixed set
    request_id  id of the engine request, if known
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.request_id: str | None = None


class ContextLengthExceeded(InvalidRequest):
    """Raised if a prompt and its completion do not fit into the model's context."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param, "context_length_exceeded")


class ConstraintError(Exception):
    """Raised if a constraint cannot be compiled, or if a text cannot continue under it."""
