"""ExtractionError, and the check for packages that an extraction may lack."""

from importlib.util import find_spec

from logitd.model.extras import installation


class ExtractionError(RuntimeError):
    """An extraction that cannot begin or continue; the message says why and what to do."""


def require_package(name: str, extra: str, use: str) -> None:
    """Raise ExtractionError if a package of an extra is not installed, before anything is
    computed."""
    if find_spec(name) is None:
        raise ExtractionError(f"{use} needs {name}: {installation(extra)}")
