"""What ends an extraction: one error for a caller to catch."""


class ExtractionError(RuntimeError):
    """An extraction that cannot begin or go on; the message says why and what to do."""
