"""The error of `model/data/`."""


class DataError(RuntimeError):
    """Unusable data. The message names the file or the numbers, and the fix."""
