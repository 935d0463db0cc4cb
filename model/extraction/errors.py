"""ExtractionError: the error for an extraction that cannot begin or continue."""


class ExtractionError(RuntimeError):
    """The message names the reason and the fix."""
