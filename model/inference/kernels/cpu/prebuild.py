"""Build the native kernels for every target of this architecture, for machines without a compiler:
`python -m logitd.model.inference.kernels.cpu.prebuild`, as the Dockerfile does.

Needs a compiler. It does not need torch, or a processor that can run the kernels.
"""

import platform

from logitd.model.inference.kernels.cpu.library import PREBUILT, build_kernels, prebuilt_path
from logitd.model.inference.kernels.cpu.targets import targets_of


def main() -> None:
    PREBUILT.mkdir(exist_ok=True)
    for target in targets_of(platform.machine()):
        print(f"building the native kernels for {target.name}", flush=True)
        build_kernels(target, prebuilt_path(target))


if __name__ == "__main__":
    main()
