"""CountedHistogram, compared with the library's own histogram."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from logitd.service.metrics.counted_histogram import CountedHistogram

BOUNDS = (0.1, 0.25, 1.0)
VALUES = st.sampled_from([*BOUNDS, 0.0, 100.0]) | st.floats(0, 3)


def samples(registry: CollectorRegistry) -> dict[tuple[str, str, str | None], float]:
    return {
        (sample.name, sample.labels["model"], sample.labels.get("le")): round(sample.value, 6)
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@given(st.lists(st.tuples(st.sampled_from("ab"), VALUES, st.integers(1, 5))))
def test_counts_are_those_of_single_observations(observed: list[tuple[str, float, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counted = CountedHistogram("gap", "text", ("model",), registry=ours, buckets=BOUNDS)
    single = Histogram("gap", "text", ("model",), registry=theirs, buckets=BOUNDS)
    for model in "ab":
        counted.labels(model)
        single.labels(model)
    for model, value, count in observed:
        counted.labels(model).observe(value, count)
        for _ in range(count):
            single.labels(model).observe(value)
    assert samples(ours) == samples(theirs)
