"""ExtractionError."""


class ExtractionError(RuntimeError):
    """An extraction that cannot begin or continue; the message names the reason and the fix."""
