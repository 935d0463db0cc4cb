"""The checkpoint: a directory with weights, vocabulary and training record. It is saved atomically,
and verified when it is read."""
