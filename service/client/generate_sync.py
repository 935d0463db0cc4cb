"""Writes `client.py` from `async_client.py`: run it by `make client` after every change there.

Both clients do the same, one with `await`; only the asynchronous one is written by hand. What
differs is words of Python (`async`, `__aenter__`), names (`AsyncClient`) and three sentences.
"""

import re
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCE, TARGET = FOLDER / "async_client.py", FOLDER / "client.py"

HEADER = (
    "# Generated from async_client.py by generate_sync.py. Do not edit: change async_client.py, "
    "then run\n# `make client`.\n"
)
SENTENCES = {
    "AsyncClient: the service from Python, for asyncio. `Client` is its twin, one call at a time.":
    "Client: the service from Python, one call at a time. `AsyncClient` is its twin for asyncio.",
    "A client may be shared by the tasks of one event loop. To cancel a task ends its request.":
    "A client may be shared by threads; a stream belongs to one.",
    "within an `async with` block": "within a `with` block",
}  # fmt: skip
"""What each of the two says in its own way; each stands in the source once."""
NAMES = {
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "aclose": "close",
    "aiter_bytes": "iter_bytes",
    "anext": "next",
    "asyncio": "time",  # both have a sleep
    "AsyncClient": "Client",
    "AsyncIterator": "Iterator",
    "AsyncStream": "Stream",
    "StopAsyncIteration": "StopIteration",
}
WORD = re.compile(rf"\b(?:async |await |(?:{'|'.join(NAMES)})\b)")


def sync_source(source: str) -> str:
    """The source of the synchronous client. ValueError where a sentence of SENTENCES is gone."""
    for asynchronous in SENTENCES:
        if source.count(asynchronous) != 1:
            raise ValueError(f"{SOURCE.name} does not say once: {asynchronous!r}")
    # Sentences stay as they are, words between them change.
    parts = re.split(f"({'|'.join(map(re.escape, SENTENCES))})", source)
    changed = (
        SENTENCES.get(part) or WORD.sub(lambda word: NAMES.get(word[0], ""), part) for part in parts
    )
    return HEADER + "".join(changed)


def main() -> None:
    TARGET.write_text(sync_source(SOURCE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
