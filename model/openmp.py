"""OpenMP: the time that torch's compute threads spin before they sleep.

By default they spin for milliseconds at the end of each parallel loop. If another program uses the
machine, they take the processors from the thread that they wait for, and training becomes tens of
times slower. OpenMP reads these variables once, when torch is imported. Imports only the standard
library.
"""

from collections.abc import Mapping

SHORT_SPIN: Mapping[str, str] = {
    "GOMP_SPINCOUNT": "10000",  # rounds; GNU's library, in torch's wheels for Linux
    "KMP_BLOCKTIME": "1",  # milliseconds; LLVM's and Intel's, in torch on macOS and from conda
}


def spin_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The OpenMP variables for a process that imports torch: those in `environment`, and a short
    spin unless it sets OMP_WAIT_POLICY."""
    policy = "OMP_WAIT_POLICY"
    names = (policy, *SHORT_SPIN)
    given = {name: environment[name] for name in names if name in environment}
    return given if policy in given else {**SHORT_SPIN, **given}
