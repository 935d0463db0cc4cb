"""ExtractionError, the error of every module of extraction."""


class ExtractionError(RuntimeError):
    """Raised if an extraction cannot begin or continue; the message gives the reason and the
    fix."""
