"""Errors of inference that a request causes. Messages name the field, the numbers and the fix.

Errors of devices, checkpoints and kernels belong to the modules that raise them.
"""


class InvalidRequest(ValueError):
    """A refused request.

    param       the field to change
    code        a word for programs, from a closed set
    request_id  the engine request, if known
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.request_id: str | None = None


class ContextLengthExceeded(InvalidRequest):
    """A text that does not fit into the model's context, with its completion."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param, "context_length_exceeded")


class ConstraintError(Exception):
    """A constraint that cannot be compiled, or lets nothing follow."""
