"""Draws a chart of the time to the first token against the gaps between tokens, from results of
`closed_loop.py`.

    python -m benchmarks.trade_off RESULTS.json CHART.svg

The last line of RESULTS.json is the JSON of a run; each of its rows is a point. The color of a
point shows the target, its shape shows the load, and its area is proportional to tokens per second.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

MARKERS = "osD^v"
LOAD_LABEL = "{} clients"


def draw(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write an SVG that plots the 99th percentile of gaps against the 99th percentile of times to
    the first token, both in ms."""
    targets = list(dict.fromkeys(result["target"] for result in results))
    loads = list(dict.fromkeys(result["load"] for result in results))
    figure = Figure(figsize=(7.6, 4.2), layout="constrained")
    axes = figure.subplots()
    for result in results:
        first, gap = result["first_token"], result["gap"]
        if first is None or gap is None:
            continue
        color = f"C{targets.index(result['target'])}"
        marker = MARKERS[loads.index(result["load"]) % len(MARKERS)]
        where = 1e3 * first["p99"], 1e3 * gap["p99"]
        axes.scatter(*where, s=result["tokens_per_second"], c=color, marker=marker, alpha=0.75)
        rate = f"{result['tokens_per_second']:,.0f} tokens/s"
        axes.annotate(rate, where, xytext=(9, 5), textcoords="offset points", fontsize=8)
    for index, target in enumerate(targets):
        axes.scatter([], [], c=f"C{index}", label=target)
    for index, load in enumerate(loads):
        label = load if load.endswith("/s") else LOAD_LABEL.format(load)
        axes.scatter([], [], c="gray", marker=MARKERS[index % len(MARKERS)], label=label)
    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.0f}")
        axis.set_minor_formatter("{x:,.0f}")
        axis.set_tick_params(which="both", labelsize=8)
    axes.set(xlabel="first token, 99th percentile, ms", ylabel="gap, 99th percentile, ms")
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(fontsize=8)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": ""}):  # text as text; the same ids
        figure.savefig(path, metadata={"Date": None})


def main(argv: Sequence[str]) -> None:
    if len(argv) != 2:
        sys.exit(__doc__)
    results, chart = map(Path, argv)
    draw(json.loads(results.read_text().splitlines()[-1])["results"], chart)


if __name__ == "__main__":
    main(sys.argv[1:])
