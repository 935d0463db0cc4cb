"""The error of `model/data/`."""


class DataError(RuntimeError):
    """Raised for unusable data. The message names the file or the numbers at fault, and the fix."""
