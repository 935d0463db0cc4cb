"""Errors of inference that are the request's own fault: what cannot be computed, and why.

The message names the field, the numbers and the fix. Errors of devices, checkpoints and kernels
belong to the modules that raise them.
"""


class InvalidRequest(ValueError):
    """A request that is refused.

    param       the field to change
    code        a word for programs, from a closed set; None: the message says it all
    request_id  which of several engine requests it is, if known
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.request_id: str | None = None


class ContextLengthExceeded(InvalidRequest):
    """A text that is too long for the model's context, with what is to follow it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param, "context_length_exceeded")


class ConstraintError(Exception):
    """A constraint that cannot be compiled, or that lets nothing follow; the message says why."""
