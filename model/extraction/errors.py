"""ExtractionError, the error of every module of extraction."""


class ExtractionError(RuntimeError):
    """Raised if an extraction cannot start or continue; the message states the reason and the
    fix."""
