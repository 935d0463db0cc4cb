"""Log: one format for the lines of all processes, on standard error."""

import logging
import sys


def configure_logging(level: str) -> None:
    """Our lines, and uvicorn's from warnings on."""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
