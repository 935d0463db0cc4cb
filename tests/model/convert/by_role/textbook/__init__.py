"""GPTs as textbooks, lectures and people at home write them, small and with random weights.

A class for each habit, with the parameter names of that habit and a forward that is written down
plainly: scores, mask, softmax, sum. The classes share the few lines of attention in `common.py` and
hardly a part besides, and nothing with what is tested. Not here: training, sampling, files.

Shapes: B sequences, T positions, C the width, H heads, D the width of a head, V ids.
"""
