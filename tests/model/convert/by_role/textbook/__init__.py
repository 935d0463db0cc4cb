"""GPTs of textbooks, lectures and hobbyists, small and with random weights.

Each class has its own parameter names and a plain forward: scores, mask, softmax, sum. `plain.py`
computes a model from the names in its scheme. The classes share the few lines of attention in
`common.py` and no code with the product. They have no training, sampling or files.

Shapes: B sequences, T positions, C width, H heads, D head width, V ids.
"""
