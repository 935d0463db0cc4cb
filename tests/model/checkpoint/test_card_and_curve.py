"""The card and the loss curve of a checkpoint: unreadable parts are skipped."""

import json
from pathlib import Path

import pytest

from logitd.model.checkpoint.card_and_curve import (
    CARD_BYTES,
    METRICS,
    METRICS_BYTES,
    MOST_POINTS,
    Curve,
    Point,
    read_card,
    read_curve,
    read_progress,
    sampled_prompt,
)
from logitd.model.training.recording.card import _curve


def checkpoint_in(run: Path, *records: object, end: str = "\n") -> Path:
    """Return a checkpoint folder in a run whose log contains these records."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    (run / METRICS).write_text("\n".join(lines) + end)
    (run / "run.json").write_text("{}")
    path = run / "step-000010"
    path.mkdir(exist_ok=True)
    return path


def train(step: int, loss: object = 2.5) -> dict[str, object]:
    return {"kind": "train", "step": step, "loss": loss, "seconds": 1.0}


def evaluation(step: int, loss: object = 2.0) -> dict[str, object]:
    return {"kind": "eval", "step": step, "val_loss": loss, "val_bits_per_byte": 1.5}


def test_curve_comes_from_the_run(tmp_path: Path) -> None:
    path = checkpoint_in(tmp_path, train(5), evaluation(5), train(10, 2.25), evaluation(10, 1.75))
    expected = Curve(
        training=(Point(5, 2.5), Point(10, 2.25)),
        validation=(Point(5, 2.0, 1.5), Point(10, 1.75, 1.5)),
    )
    assert read_curve(path, None) == expected
    best = tmp_path / "best"
    best.symlink_to(path.name)
    assert read_curve(best, "| 1 | 9.0000 | 9.0000 |") == expected, (
        "the curve is the run's, not the card's"
    )
    assert read_curve(tmp_path / "history" / "step-000005", None) == expected
    assert read_curve(tmp_path / "base", None) == Curve(), "another training wrote the base"


def test_curve_without_a_run_comes_from_the_card(tmp_path: Path) -> None:
    records = [evaluation(step, 3 - step / 1000) for step in (0, 500, 1500)]
    card = f"# a model\n\n| steps | 1,500 |\n\n## Curve\n\n{_curve(records)}\n"
    points = (Point(0, 3.0, 1.5), Point(500, 2.5, 1.5), Point(1500, 1.5, 1.5))
    assert read_curve(tmp_path, card) == Curve(validation=points)
    assert read_curve(tmp_path, None) == Curve()


def test_progress_is_the_newest_report_with_its_samples(tmp_path: Path) -> None:
    plan = {"done": 0.25, "seconds_left": 90.5, "tokens_per_second": 1000.0}
    (tmp_path / "samples.txt").write_text("=== step 1\na\n\n=== step 5\nb\n\n=== step 5\nc\nd\n\n")
    path = checkpoint_in(tmp_path, train(5) | plan, train(10, 2.25) | plan, evaluation(10))
    found = read_progress(path)
    assert found is not None
    assert (found.step, found.done, found.loss, found.seconds_left) == (10, 0.25, 2.25, 90.5)
    assert (found.sampled_at, found.samples) == (5, ("b", "c\nd"))
    assert 0 <= found.idle_seconds < 600
    assert read_progress(checkpoint_in(tmp_path, train(5))) is None, "an earlier version's report"
    (tmp_path / METRICS).unlink()
    assert read_progress(path) is None


@pytest.mark.parametrize(
    ("card", "prompt"),
    [
        ("## Samples\n\nDrawn.\n\n```\nOnce\n upon▸ a\n```\n\n```\nx▸y\n```\n", "Once\n upon"),
        ("# a\n\n## Samples\n\n````\n```▸`\n````\n", "```"),
        ("```\nx▸y\n```\n", None),
        ("## Samples\n", None),
        (None, None),
    ],
)  # fmt: skip
def test_prompt_comes_from_the_first_sample(card: str | None, prompt: str | None) -> None:
    assert sampled_prompt(card) == prompt


def test_unreadable_lines_are_skipped(tmp_path: Path) -> None:
    damaged = ['{"kind": "train"', "[1]", "NaN", '{"kind": "eval", "step": "x", "val_loss": 1.5}',
               '{"kind": "train", "step": 3, "loss": Infinity}', "\x00", "[" * 100_000,
               '{"kind": "eval", "step": 4, "val_loss": null}']  # fmt: skip
    path = checkpoint_in(tmp_path, train(1), *damaged, train(9), '{"kind": "tr', end="")
    assert [point.step for point in read_curve(path, None).training] == [1, 9]


def test_long_log_is_read_at_its_end_and_thinned(tmp_path: Path) -> None:
    padding = {"more": "x" * 1000}
    count = METRICS_BYTES // 500
    path = checkpoint_in(tmp_path, *(train(step) | padding for step in range(count)))
    points = read_curve(path, None).training
    assert len(points) <= MOST_POINTS
    assert points[-1].step == count - 1
    assert points == tuple(sorted(points, key=lambda point: point.step))
    assert points[0].step > count // 4


def test_unreadable_card_is_ignored(tmp_path: Path) -> None:
    assert read_card(tmp_path) is None
    card = tmp_path / "README.md"
    card.write_bytes(b"\xff\xfe")
    assert read_card(tmp_path) is None
    card.write_text("x" * (CARD_BYTES + 1))
    assert read_card(tmp_path) is None
    card.write_text("# a model\n")
    assert read_card(tmp_path) == "# a model\n"
