"""The plot of a run."""

from pathlib import Path
from typing import Any

import pytest

from logitd.model.training.run.plot import draw

image = pytest.importorskip("matplotlib.image", reason="matplotlib draws the picture")
pytestmark = pytest.mark.usefixtures("pictures")


def metrics(steps: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for step in range(steps + 1):
        loss = 3 / (step + 1)
        if step:
            found.append(
                {"kind": "train", "step": step, "loss": loss} | {"learning_rate": 1 - step / steps}
            )
        if step % 5 == 0:
            bits = loss / 2
            found.append(
                {"kind": "eval", "step": step, "val_loss": loss, "val_bits_per_byte": bits}
            )
    return found


def colors(path: Path, rows: slice) -> set[tuple[int, ...]]:
    """The colors in a range of rows of the picture; `rows` is in tenths of the height."""
    picture = image.imread(path)[:, :, :3]
    height = len(picture)
    part = picture[height * rows.start // 10 : height * rows.stop // 10]
    return {tuple(each) for each in (part.reshape(-1, 3) * 255).round().astype(int).tolist()}


def test_each_curve_is_in_its_axes(tmp_path: Path) -> None:
    path = tmp_path / "loss.png"
    assert draw(metrics(20), path, "a run")
    blue, orange, green, grey = (31, 119, 180), (255, 127, 14), (44, 160, 44), (127, 127, 127)
    top, middle, bottom = (colors(path, slice(*rows)) for rows in ((0, 4), (5, 8), (8, 10)))
    assert {blue, orange} <= top
    assert green in middle
    assert green not in top
    assert grey in bottom
    assert [each.name for each in tmp_path.iterdir()] == ["loss.png"]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_plot_of_a_new_run_is_drawn(tmp_path: Path, count: int) -> None:
    assert draw(metrics(5)[:count], tmp_path / "loss.png", "a run")
    assert (tmp_path / "loss.png").stat().st_size > 1000
