"""Small GPTs with random weights, written like those in textbooks, in lectures and by hobbyists.

Each class has its own parameter names and a plain forward pass: scores, mask, softmax, sum.
`plain.py` computes a model from the names in its scheme. The classes share only the few lines of
attention in `common.py`, and use no code of the product. They cannot train, sample, or read or
write files.

Shapes: B sequences, T positions, C width, H heads, D head width, V ids.
"""
