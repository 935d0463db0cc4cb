"""Probe: a text on which two tokenizers are compared.

It contains everything that usually reveals differences: several scripts, contractions in upper and
lower case, code, runs of digits of many lengths, all kinds of white space, characters of one to
four bytes, and combining marks. It has no names of special tokens. It has no characters added after
Unicode 9, because the regular-expression engines disagree about newer characters.
"""

_PARTS = (
    "The quick brown fox doesn't jump; he'll SAY IT'S they'Ve I'D we're -- \"so\" (it's 'quoted').",
    "def f(x: int) -> dict[str, int]:\n\t\treturn {'a': x**2, \"b\": [1, 22, 333]}  # comment\n",
    "    for (int i = 0; i < 10; ++i) {\r\n        a[i] += b->c.d::e;\r\n    }\r\n\r\n",
    "https://example.org/a_b?c=%20&d=1#e user@example.org C:\\path\\file.txt $99.95 50% #1 @x",
    "naïve façade Ünïcödé ĆČŽ ß ﬁ Ωμέγα Привет, мир! שלום עולם مرحبا بالعالم",
    "नमस्ते दुनिया สวัสดีชาวโลก 你好，世界。こんにちは世界 안녕하세요 ਪੰਜਾਬੀ தமிழ்",
    "😀👍🏽👨‍👩‍👧 ∑∫√≠ ½ Ⅷ ٣٤٥ x² e\u0301 a\u0308o",
    "\u00a0\u2003\u3000no\u00a0break\u2028line\u0085next\ttab\x0bform\x0c zero\u200bwidth",
)


def probe_text() -> str:
    """The text for comparing tokenizers. It has about 1,500 characters."""
    digits = " ".join("1234567890123"[:length] for length in range(1, 14))
    lengths = (1, 2, 3, 4, 7, 8, 17, 70)
    blanks = "".join(f"a{' ' * length}b{chr(10) * length}c" for length in lengths)
    mixed = "".join(f"x{tail}" for tail in (" \n", "\n ", " \n\n  ", "\t\n", "\r\n \r\n", "  \t "))
    marks = " ".join(mark * length for mark in "-=*#._!/" for length in (1, 2, 5, 16, 33))
    low = "".join(map(chr, range(32, 127)))
    return "\n".join((*_PARTS, digits, blanks, mixed, marks, low, " end  "))
