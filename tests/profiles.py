"""Number of examples that hypothesis draws for a property test, by profile.

`make test` runs the profile "fast". `make test-slow` runs every property test again with "full":
half the number that each test states. Both draw the same examples each time, so that a failure is
about the last change. "thorough" draws all of them anew each time: `pytest --hypothesis-profile
thorough`. An expensive or a cheap test states its own number with `examples`, so that it scales
with the profile; all others take the profile's. A failing example that was found stays with its
test as an @example. This module does not choose: conftest.py loads the default.
"""

from hypothesis import settings

THOROUGH = 100
FULL = 50
FAST = 6


def register_profiles() -> None:
    """Register all and load "fast". A busy machine is not a bug: pytest's own timeout catches what
    hangs, so that no example has a deadline. Each states whether it draws anew: where CI is set,
    hypothesis' own default is not to."""
    settings.register_profile("thorough", deadline=None, max_examples=THOROUGH, derandomize=False)
    settings.register_profile("full", deadline=None, max_examples=FULL, derandomize=True)
    settings.register_profile("fast", deadline=None, max_examples=FAST, derandomize=True)
    settings.load_profile("fast")


def examples(full: int, fast: int | None = None) -> int:
    """The number of examples where the thorough profile draws `full` of them. `fast`: what the
    fast profile draws, where each example takes tens of milliseconds."""
    drawn = settings().max_examples
    if fast is not None and drawn < FULL:
        return fast
    return max(1, full * drawn // THOROUGH)
