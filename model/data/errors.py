"""DataError."""


class DataError(RuntimeError):
    """Unusable data; the message names the file or the numbers and the fix."""
