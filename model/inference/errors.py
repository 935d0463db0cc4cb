"""Errors of inference that are the request's own fault: what cannot be computed, and why.

The message names the numbers and the way out. What is wrong with a device, a checkpoint or a kernel
is said by the module that finds it.
"""


class InvalidRequest(ValueError):
    """A request that the engine refuses; `param` names the field to mend."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ConstraintError(Exception):
    """A constraint that cannot be compiled, or that lets nothing follow; the message says why."""
