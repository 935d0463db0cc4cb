"""ExtractionError, which every module of extraction raises."""


class ExtractionError(RuntimeError):
    """An extraction cannot begin or continue; the message names the reason and the fix."""
