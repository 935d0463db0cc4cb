"""How a model can be served, by the names that the command line gives. Without torch."""

from typing import Literal

KernelChoice = Literal["auto", "native", "torch"]
Quantization = Literal["none", "int8"]
Speculation = Literal["none", "ngram"]
DRAFTED_ROWS = 16
"""Rows of a decode step up to which drafts are added to it; with more, each costs what it saves."""
