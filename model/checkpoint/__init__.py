"""The checkpoint: a directory with weights, vocabulary and record, saved whole and verified."""
