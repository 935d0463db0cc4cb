"""Numbers of examples of property tests, by hypothesis profile.

`make test` uses the profile "fast". `make test-slow` runs all property tests again with "full",
which has two fifths of the examples of "thorough". Both draw the same examples each time, so a
failure is due to the last change. "thorough" draws other examples each time: `pytest
--hypothesis-profile thorough`. Expensive or cheap tests set their number with `examples`, so that
it scales with the profile. Each failing example that was found is kept with its test as an
@example.
"""

from hypothesis import settings

THOROUGH = 100
FULL = 40
FAST = 6


def register_profiles() -> None:
    """Register all profiles and load "fast". No example has a deadline, because machines may be
    busy; pytest's timeout catches hanging tests. `derandomize` is explicit, because its default
    depends on the variable CI."""
    settings.register_profile("thorough", deadline=None, max_examples=THOROUGH, derandomize=False)
    settings.register_profile("full", deadline=None, max_examples=FULL, derandomize=True)
    settings.register_profile("fast", deadline=None, max_examples=FAST, derandomize=True)
    settings.load_profile("fast")


def examples(full: int, fast: int | None = None) -> int:
    """Number of examples of a test in the current profile. `full` is the number in the profile
    "thorough", and the other profiles have a fixed share of it. A test whose examples take tens of
    milliseconds each sets its number for the profile "fast" with `fast`."""
    drawn = settings().max_examples
    if fast is not None and drawn < FULL:
        return fast
    return max(1, full * drawn // THOROUGH)
