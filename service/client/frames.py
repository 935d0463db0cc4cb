"""Frames: results as pandas data frames, and heat maps drawn with matplotlib. Both packages are
optional.

The frame of a record has one row for each of its innermost parts, such as the tokens of the
prompts. Its columns are the scalar values of the part, and the scalar values of the enclosing parts
under prefixed names (`prompt_index`). The frame of an array has a column for each index of the
array's last axis.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

Single = (bool, int, float, str, bytes, type(None))
"""Types of the values that become columns."""


def record_frame(result: object, *paths: str) -> Any:
    """A data frame of the parts at each path ("prompts.tokens"). With several paths, the column
    `part` names the last component of a row's path."""
    rows: list[Mapping[str, Any]] = []
    for path in paths:
        *_, last = names = path.split(".")
        kind = {"part": last} if len(paths) > 1 else {}
        rows += ({**row, **kind} for row in _rows(result, names, {}))
    return _needed("pandas", "to_dataframe").DataFrame(rows)


def array_frame(array: npt.NDArray[Any], axes: Mapping[str, Any]) -> Any:
    """A data frame of an array (..., columns); `axes` are names and labels of all axes but the
    last."""
    pandas = _needed("pandas", "to_dataframe")
    index = pandas.MultiIndex.from_product(list(axes.values()), names=list(axes))
    if len(axes) == 1:
        index = index.get_level_values(0)
    return pandas.DataFrame(array.reshape(len(index), -1), index=index)


def heat_map(
    values: Any,
    *,
    rows: Sequence[object] | None = None,
    columns: Sequence[object] | None = None,
    title: str = "",
    axes: Any = None,
) -> Any:
    """Draw a grid of values (rows, columns) on matplotlib's `axes` (None: a new figure), in red
    above 0 and blue below. Returns the axes."""
    if axes is None:
        axes = _needed("matplotlib.pyplot", "heat_map").figure(layout="constrained").add_subplot()
    grid = np.atleast_2d(np.asarray(values, dtype=np.float64))
    if grid.ndim != 2:
        raise ValueError(
            f"values have {grid.ndim} axes; a heat map needs two: select a part of the array"
        )
    largest = float(np.abs(grid[np.isfinite(grid)]).max(initial=0)) or 1.0
    image = axes.imshow(grid, cmap="RdBu_r", vmin=-largest, vmax=largest, aspect="auto")
    axes.figure.colorbar(image, ax=axes)
    axes.set_title(title)
    if rows is not None:
        axes.set_yticks(range(len(rows)), rows)
    if columns is not None:
        axes.set_xticks(range(len(columns)), columns)
    return axes


def _rows(
    part: object, names: Sequence[str], outer: Mapping[str, Any]
) -> Iterator[Mapping[str, Any]]:
    """Yield a row for each part at the path `names` in `part`. `outer` holds the values of the
    enclosing parts."""
    if not names:
        yield {**outer, **_singles(part)}
        return
    inner = getattr(part, names[0])
    for each in inner if isinstance(inner, tuple) else () if inner is None else (inner,):
        if len(names) == 1:
            yield from _rows(each, (), outer)
            continue
        prefix = names[0].removesuffix("s")
        values = {
            name if name == prefix else f"{prefix}_{name}": value
            for name, value in _singles(each).items()
        }
        yield from _rows(each, names[1:], {**outer, **values})


def _singles(part: Any) -> dict[str, Any]:
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    return {name: value for name, value in values.items() if isinstance(value, Single)}


def _needed(module: str, method: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{method} needs {package}: pip install {package}") from error
