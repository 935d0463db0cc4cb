"""Log: lines on standard error, as text or JSON.

A JSON line is an object with `time` (UTC), `level`, `logger`, `message`, additional fields
(`extra={FIELDS: {...}}`), and `exception` with a traceback.
"""

import logging
import sys
from datetime import UTC, datetime

import orjson

FIELDS = "fields"
"""Attribute of a log record that holds additional fields."""


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # A message may contain a file name that is not UTF-8.
        texts = {
            name: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
            for name, value in line.items()
        }
        return orjson.dumps(texts).decode()


def configure_logging(level: str, *, json: bool = False) -> None:
    """Log messages of `level` and above; of uvicorn's messages, only those of WARNING and above."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter()
        if json
        else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
