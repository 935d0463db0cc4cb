"""OpenMP: limits how long torch's compute threads spin before they sleep.

By default a thread spins for milliseconds at the end of each parallel loop while it waits for the
others. If another program uses the machine too, the spinning threads can occupy the processor that
the last thread needs, and training becomes tens of times slower. OpenMP reads its environment
variables only once, when torch is imported. So this module imports only the standard library.
"""

from collections.abc import Mapping

SHORT_SPIN: Mapping[str, str] = {
    "GOMP_SPINCOUNT": "10000",  # rounds; GNU's library, in torch's wheels for Linux
    "KMP_BLOCKTIME": "1",  # milliseconds; LLVM's and Intel's, in torch on macOS and from conda
}


def spin_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The OpenMP variables for a process that imports torch: the variables set in `environment`
    and, unless it sets OMP_WAIT_POLICY, variables that make the spin short."""
    policy = "OMP_WAIT_POLICY"
    names = (policy, *SHORT_SPIN)
    given = {name: environment[name] for name in names if name in environment}
    return given if policy in given else {**SHORT_SPIN, **given}
