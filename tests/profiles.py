"""Numbers of examples of property tests, by hypothesis profile.

`make test` uses the profile "fast"; `make test-slow` runs all property tests again with "full", two
fifths of the number that each test states. Both draw the same examples each time, so a failure is
due to the last change. "thorough" draws other examples each time: `pytest --hypothesis-profile
thorough`. Expensive or cheap tests state their number with `examples`, so it scales with the
profile. Failing examples stay with their tests as an @example.
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
    """Number of examples in the current profile, for a test that has `full` examples in the
    thorough one. `fast` sets the number for the fast profile, for examples that take tens of
    milliseconds."""
    drawn = settings().max_examples
    if fast is not None and drawn < FULL:
        return fast
    return max(1, full * drawn // THOROUGH)
