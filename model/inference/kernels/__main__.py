"""Build the native kernels now rather than at the first start: `python -m
model.inference.kernels`."""

from logitd.model.inference.kernels.cpu.library import KernelsUnavailable, load_library


def main() -> None:
    try:
        load_library(print)
    except KernelsUnavailable as reason:
        print(f"decoding will be in plain torch, which is slower: {reason}")


if __name__ == "__main__":
    main()
