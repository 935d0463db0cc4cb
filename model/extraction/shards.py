"""Shards: writes a shard's file, Parquet or safetensors. Equal values always result in equal bytes.

Logprobs and the lens are written as Parquet with one row per token, stages as safetensors with one
tensor per stage. A row of the lens has lists with one entry per layer, so the lens too has only one
row per token. Parquet needs pyarrow, an optional dependency.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save

from logitd.model.extraction.errors import ExtractionError
from logitd.model.extraction.plan import Unit

Column = Any
"""An Arrow array."""
Booleans = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int32]
Values = npt.NDArray[Any]


def nullable_column(values: Values, present: Booleans) -> Column:
    """A column (tokens,) with `values` (P,) at the P tokens where `present` is true, null
    elsewhere."""
    import pyarrow as arrow

    whole = np.zeros(len(present), dtype=values.dtype)
    whole[present] = values
    return arrow.array(whole, mask=~present)


def list_column(values: Values, counts: Integers, present: Booleans) -> Column:
    """A column (tokens,) of lists, null where `present` is false. `counts` are the lengths of the
    lists. `values` are the entries of all lists in order: numbers (entries,), or lists of K numbers
    (entries, K)."""
    import pyarrow as arrow

    entries = arrow.array(values.reshape(-1))
    if values.ndim == 2:
        ends = np.arange(0, values.size + 1, values.shape[1], dtype=np.int32)
        entries = arrow.ListArray.from_arrays(arrow.array(ends), entries)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return arrow.ListArray.from_arrays(arrow.array(offsets), entries, mask=arrow.array(~present))


def parquet_file(units: Sequence[Unit], columns: Mapping[str, Column]) -> bytes:
    """A Parquet file with a row for each counted token of the units: its document, source, position
    and id, and the values of `columns`."""
    import pyarrow as arrow
    from pyarrow import parquet

    sources = {unit.source: None for unit in units}
    index = {source: place for place, source in enumerate(sources)}
    indices = _repeated([index[unit.source] for unit in units], units, np.int32)
    places = {
        "document": arrow.array(_document_column(units)),
        "source": arrow.DictionaryArray.from_arrays(arrow.array(indices), arrow.array([*sources])),
        "position": arrow.array(position_column(units)),
        "token": arrow.array(_token_column(units)),
    }
    schema = arrow.schema(
        [
            *(arrow.field(name, column.type, nullable=False) for name, column in places.items()),
            *(arrow.field(name, column.type) for name, column in columns.items()),
        ]
    )
    table = arrow.Table.from_arrays([*places.values(), *columns.values()], schema=schema)
    stream = arrow.BufferOutputStream()
    parquet.write_table(table, stream, compression="zstd")
    return bytes(stream.getvalue())


def safetensors_file(
    units: Sequence[Unit], tensors: Mapping[str, Values], kept: Booleans, dtype: torch.dtype
) -> bytes:
    """A safetensors file for the counted tokens that `kept` selects from the units: `tensors`
    (tokens, ...) in `dtype`, and the tensors `document`, `position` and `token` (tokens,). Raises
    ExtractionError for values that the dtype cannot hold."""
    stored = {}
    for name, values in tensors.items():
        whole = torch.from_numpy(np.ascontiguousarray(values))
        stored[name] = whole.to(dtype)
        if dtype is not torch.float32 and (stored[name].isinf() & whole.isfinite()).any():
            raise ExtractionError(
                f"{name} has the value {float(whole.abs().max()):.6g}, which {dtype} cannot hold: "
                "store bfloat16 or float32 (--stored-dtype)"
            )
    columns: dict[str, Values] = {
        "document": _document_column(units),
        "position": position_column(units),
        "token": _token_column(units),
    }
    stored |= {name: torch.from_numpy(column[kept]) for name, column in columns.items()}
    return save(stored)


def _document_column(units: Sequence[Unit]) -> npt.NDArray[np.int64]:
    return _repeated([unit.document for unit in units], units, np.int64)


def position_column(units: Sequence[Unit]) -> Integers:
    """Position of each counted token in its document (tokens,)."""
    return np.concatenate([np.arange(unit.place[1], unit.end[1], dtype=np.int32) for unit in units])


def _token_column(units: Sequence[Unit]) -> Integers:
    return np.concatenate([np.array(unit.token_ids[unit.context :], np.int32) for unit in units])


def _repeated(values: Sequence[int], units: Sequence[Unit], kind: Any) -> Values:
    return np.repeat(np.array(values, dtype=kind), [unit.counted for unit in units])
