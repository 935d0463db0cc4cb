"""GPTs of textbooks, lectures and hobbyists, small and with random weights.

Each class has its own parameter names and a plain forward: scores, mask, softmax, sum. `plain.py`
computes a model from the names in its scheme. The classes share the few lines of attention in
`common.py`, and nothing with the product. Without training, sampling and files.

Shapes: B sequences, T positions, C the width, H heads, D the width of a head, V ids.
"""
