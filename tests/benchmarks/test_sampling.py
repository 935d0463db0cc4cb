"""What sampling costs: a small run, whose two samplers have to agree."""

import json

import pytest

from benchmarks.sampling import WAYS, main
from logitd.model.inference.kernels.cpu.library import KernelsUnavailable, load_library


def test_every_filter_is_measured_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        load_library()
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
    flags = [
        "--vocab-size",
        "300",
        "--rows",
        "3",
        "--spread",
        "2",
        "--rounds",
        "1",
        "--threads",
        "1",
    ]
    assert main(flags) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [row["way"] for row in results] == list(WAYS)
    assert all(row["native"] > 0 and row["torch"] > 0 for row in results)


@pytest.mark.parametrize("flags", [["--rows", "0"], ["--spread", "-1"], ["--spread", "inf"]])
def test_what_cannot_be_measured_is_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(flags)
