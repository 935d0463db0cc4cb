"""Sweeps: the grid of cells."""

import time

from logitd.model.inference.interventions import Intervention
from logitd.model.inference.sweep import make_grid
from tests.model.factories import tiny_config


def test_grid_makes_its_cells_on_demand() -> None:
    """The grid once made all 9,216 cells in advance. For each cell, all stages were searched for
    its layer, which took half a minute in total."""
    config = tiny_config(n_layer=48)
    varied = [
        Intervention(stage=f"blocks.{layer}.output", operation="zero", positions="all")
        for layer in range(48)
    ]
    started = time.process_time()
    grid = make_grid(varied, ("layers", "positions"), 192, config)
    cells = grid.cells()
    first, (change,) = next(cells)
    assert time.process_time() - started < 2
    assert (first.layer, first.position) == (0, 0)
    assert (change.stage, change.positions) == (varied[0].stage, (0,))
    assert sum(1 for _ in cells) == 48 * 192 - 1
