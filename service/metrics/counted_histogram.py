"""CountedHistogram: a Prometheus histogram that counts any number of equal values at once.

The sequences of a step have only a few different latencies, so equal ones are counted together.
Calling `Histogram.observe` for each token would take a microsecond, as long as everything else that
the event loop does for the token.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString


class CountedValues:
    """One series: the number of values in each bucket, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one counts values above all bounds
        self.sum = 0.0

    def observe(self, value: float, count: int) -> None:
        self.counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count


class CountedHistogram:
    """A family of series, with the interface of `prometheus_client.Histogram`."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        *,
        registry: CollectorRegistry,
        buckets: Sequence[float],
    ) -> None:
        """`buckets` are upper bounds in increasing order."""
        self._name, self._text, self._labels, self._bounds = name, text, labels, buckets
        self._series: dict[tuple[str, ...], CountedValues] = {}
        registry.register(self)

    def labels(self, *values: str) -> CountedValues:
        """The series with these labels. The first call creates it."""
        return self._series.setdefault(values, CountedValues(self._bounds))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for labels, values in list(self._series.items()):  # a scrape runs in a thread
            counts = zip(names, accumulate(values.counts), strict=True)
            family.add_metric(labels, list(counts), values.sum)
        yield family
