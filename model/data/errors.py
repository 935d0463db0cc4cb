"""What is wrong with data that a person gave: one error for a caller to catch."""


class DataError(RuntimeError):
    """Data that cannot be used; the message names the file or the numbers and says what to do."""
