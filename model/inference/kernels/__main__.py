"""Build the native kernels before the first start: `python -m logitd.model.inference.kernels`."""

from logitd.model.inference.kernels.cpu.library import KernelsUnavailable, load_library


def main() -> None:
    try:
        load_library(print)
    except KernelsUnavailable as reason:
        print(f"decoding will use plain torch, which is slower: {reason}")


if __name__ == "__main__":
    main()
