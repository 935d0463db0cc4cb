"""Stock torch, one operation after the other: the twin that the faster decoders are tested
against."""
