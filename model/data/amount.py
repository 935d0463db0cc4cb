"""Amount: how many bytes a text has, before it is tokenised, as far as it matters.

Whoever chooses a recipe by the length of the text asks for it. A text without its sizes has to be
read for that, so counting ends at a limit: what is longer is long enough. Does not split training
from validation.
"""

from collections.abc import Iterator

from logitd.model.data.shards import text_bytes_of
from logitd.model.data.sources.document import Document, Text


def count_bytes(text: Text, limit: float) -> int:
    """Bytes in UTF-8 of all documents, or of shards of what they stand for; where these are more
    than `limit`, some number above it."""
    if text.shards:
        return sum(map(text_bytes_of, text.shards))
    total = 0
    for document in text.documents:
        sizes = (document.size,) if document.size is not None else _sizes(document)
        for size in sizes:
            total += size
            if total > limit:
                return total
    return total


def _sizes(document: Document) -> Iterator[int]:
    return (len(piece.encode()) for piece in document.pieces())
