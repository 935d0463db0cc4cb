"""What a GPU gives: whether it computes what is promised, and how fast. `python -m benchmarks.gpu
--help`."""
