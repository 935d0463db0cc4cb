"""The memory of lexers is returned to the system after their sequences have ended."""

import ctypes
import subprocess
import sys

import pytest

from logitd.model.inference.constraints.heap import TRIM_BYTES, resident

WRITE = r"""
import random
from logitd.model.inference.constraints.compiler import Compiler, Source
from logitd.model.inference.constraints.heap import resident
from logitd.model.text.tokenizer import END_OF_TEXT, SPLIT_PATTERN, Tokenizer

ranks = {bytes([byte]): byte for byte in range(256)}
special = {END_OF_TEXT: 256}
tokenizer = Tokenizer(ranks=ranks, pattern=SPLIT_PATTERN, special_tokens=special)
constraint = Compiler(tokenizer).compile(Source("regex", r"[\w.]+@[\w.]+\.\w{2,4}"))

def write(count):
    matchers = [constraint.matcher() for _ in range(count)]
    for _ in range(20):
        for seed, matcher in enumerate(matchers):
            if not matcher.complete:
                ids = matcher.allowed().nonzero()[0].tolist()
                matcher.advance(random.Random(seed).choice(ids))
    return matchers

write(2)
before = resident()
matchers = write(120)
grown = resident() - before
del matchers
print(grown, resident() - before)
"""


@pytest.mark.skipif(not resident(), reason="the system does not report a process's size")
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_memory_of_ended_sequences_is_freed() -> None:
    output = subprocess.run(
        [sys.executable, "-c", WRITE], check=True, capture_output=True, text=True
    ).stdout
    grown, left = map(int, output.split())
    assert grown > 2 * TRIM_BYTES
    assert left < TRIM_BYTES
