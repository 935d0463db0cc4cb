"""Shards: the bytes of one.

Logprobs and the lens are a Parquet file with a row for each token, stages a safetensors file with a
tensor for each. The same values give the same bytes.

A row of the lens has lists with an entry for each layer, instead of a row for each layer: so it
stands beside the row of the logprobs with the same document and position, tokens are counted alike
in all files, and what is asked across layers (the first at which the token was the likeliest) is
asked of a single row: `list_position(layer_ranks, 1)` in DuckDB, `np.stack(frame.layer_ranks)` in
pandas, whose `explode` and DuckDB's `unnest` give a row for each layer.

Parquet needs pyarrow (an optional dependency). Does not decide what a shard has (`plan.py`) or
which are there, and does not write (`index.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from logitd.model.extraction.errors import ExtractionError
from logitd.model.extraction.plan import Unit
from logitd.model.extras import installation

Integers = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    """What is said of the counted tokens of one or several units.

    logprobs  (tokens,), NaN where `predicted` is not set
    predicted (tokens,), whether there is a token before it
    counts    (tokens,), how many of the likeliest follow in `top_tokens`
    """

    logprobs: Floats
    predicted: npt.NDArray[np.bool_]
    counts: Integers
    top_tokens: Integers
    top_logprobs: Floats


@dataclass(frozen=True, slots=True, eq=False)
class LensRows:
    """What a lens says of the counted tokens of one or several units: P of them are predicted, L
    layers, K likeliest.

    predicted (tokens,), whether there is a token before it
    logprobs, ranks, entropies, divergences  (P, L)
    top_tokens, top_logprobs  (P, L, K)
    """

    predicted: npt.NDArray[np.bool_]
    logprobs: Floats
    ranks: Integers
    entropies: Floats
    divergences: Floats
    top_tokens: Integers
    top_logprobs: Floats


def require_parquet() -> None:
    """Raise ExtractionError where Parquet cannot be written, before anything is computed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ExtractionError(
            "logprobs are written as Parquet, which needs pyarrow, and that is not installed: "
            f"{installation('parquet')}"
        ) from error


def parquet_shard(units: Sequence[Unit], rows: Sequence[TokenRows], *, top: bool) -> bytes:
    """The Parquet file of units, with the likeliest tokens in each place if `top`."""
    import pyarrow as arrow

    predicted = np.concatenate([row.predicted for row in rows])
    logprobs = np.concatenate([row.logprobs for row in rows])
    columns = {"logprob": arrow.array(logprobs, mask=~predicted)}
    if top:
        offsets = np.concatenate([[0], np.cumsum(np.concatenate([row.counts for row in rows]))])
        for name, kind in (("top_tokens", np.int32), ("top_logprobs", np.float32)):
            values = np.concatenate([getattr(row, name) for row in rows]).astype(kind)
            columns[name] = arrow.ListArray.from_arrays(
                arrow.array(offsets.astype(np.int32)),
                arrow.array(values),
                mask=arrow.array(~predicted),
            )
    return _parquet(units, columns)


def lens_shard(units: Sequence[Unit], rows: Sequence[LensRows]) -> bytes:
    """The Parquet file of units, of each token a list for each figure with an entry a layer."""
    import pyarrow as arrow

    predicted = np.concatenate([row.predicted for row in rows])
    columns: dict[str, Any] = {}
    for name in ("logprobs", "ranks", "entropies", "divergences", "top_tokens", "top_logprobs"):
        values = np.concatenate([getattr(row, name) for row in rows])  # (P, L) or (P, L, K)
        entries = arrow.array(values.reshape(-1))
        if values.ndim == 3:  # of each layer a list too
            ends = np.arange(0, values.size + 1, values.shape[2], dtype=np.int32)
            entries = arrow.ListArray.from_arrays(arrow.array(ends), entries)
        offsets = np.concatenate([[0], np.cumsum(predicted * values.shape[1])])
        columns[f"layer_{name}"] = arrow.ListArray.from_arrays(
            arrow.array(offsets.astype(np.int32)), entries, mask=arrow.array(~predicted)
        )
    return _parquet(units, columns)


def _parquet(units: Sequence[Unit], columns: Mapping[str, Any]) -> bytes:
    """A Parquet file of the counted tokens of units: which they are, and `columns` (Arrow arrays)
    that may be null."""
    import pyarrow as arrow
    from pyarrow import parquet

    sources = list(dict.fromkeys(unit.source for unit in units))
    of_source = {source: index for index, source in enumerate(sources)}
    indices = _repeated([of_source[unit.source] for unit in units], units, np.int32)
    which = {
        "document": arrow.array(document_column(units)),
        "source": arrow.DictionaryArray.from_arrays(arrow.array(indices), arrow.array(sources)),
        "position": arrow.array(position_column(units)),
        "token": arrow.array(_counted_ids(units)),
    }
    schema = arrow.schema(
        [
            *(arrow.field(name, column.type, nullable=False) for name, column in which.items()),
            *(arrow.field(name, column.type) for name, column in columns.items()),
        ]
    )
    table = arrow.Table.from_arrays([*which.values(), *columns.values()], schema=schema)
    stream = arrow.BufferOutputStream()
    parquet.write_table(table, stream, compression="zstd")
    return bytes(stream.getvalue())


def safetensors_shard(
    units: Sequence[Unit], values: Sequence[Mapping[str, npt.NDArray[Any]]]
) -> bytes:
    """The safetensors file of units: of each stage a tensor (tokens, ...), and `document`,
    `position` and `token` (tokens,)."""
    tensors = {
        name: np.ascontiguousarray(np.concatenate([value[name] for value in values]))
        for name in values[0]
    }
    tensors["document"] = document_column(units)
    tensors["position"] = position_column(units)
    tensors["token"] = _counted_ids(units)
    return save(tensors)


def document_column(units: Sequence[Unit]) -> npt.NDArray[np.int64]:
    """The document of each counted token: (tokens,)."""
    column: npt.NDArray[np.int64] = _repeated([unit.document for unit in units], units, np.int64)
    return column


def position_column(units: Sequence[Unit]) -> Integers:
    """Where in its document each counted token is: (tokens,)."""
    parts = [np.arange(unit.place[1], unit.end[1], dtype=np.int32) for unit in units]
    return np.concatenate(parts)


def _counted_ids(units: Sequence[Unit]) -> Integers:
    return np.concatenate(
        [np.array(unit.token_ids[unit.context :], dtype=np.int32) for unit in units]
    )


def _repeated(values: Sequence[int], units: Sequence[Unit], kind: Any) -> npt.NDArray[Any]:
    """The value of each unit, once for each counted token."""
    return np.repeat(np.array(values, dtype=kind), [unit.counted for unit in units])
