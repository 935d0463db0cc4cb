"""DataError: the error for unusable data."""


class DataError(RuntimeError):
    """The message names the file or the numbers, and the fix."""
