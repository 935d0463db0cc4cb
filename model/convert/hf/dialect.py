"""Split patterns between two dialects of regular expressions.

tiktoken reads patterns by the Rust engine fancy-regex, Hugging Face's tokenizers by Oniguruma in
Ruby's syntax. They agree on almost all that split patterns use, and not on this:

  X{1,2}+   takes and keeps at most two there; here, in Ruby's syntax, "one or two", many times
  $ and ^   the ends of the text there; the ends of each line in Ruby's syntax
  (?s: (?m: other letters for "the dot is any character"

What is rewritten means the same afterwards; what cannot be is refused. The two also bring tables of
Unicode of their own age: a letter that was added last year may be a letter to one of them alone.
"""

import re
from collections.abc import Callable

from logitd.model.convert.foreign import ConvertError

_ESCAPE = re.compile(r"\\(?:[pPxuN]\{[^}]*\}|.)", re.DOTALL)
_OPENING = re.compile(r"\((?:\?(?:[:=!>]|<[=!]|(?P<options>[a-zA-Z-]+)[:)]))?")
_REPEAT = re.compile(r"(?P<interval>\{\d+(?:,\d*)?\})(?P<keep>\+)|(?:[*+?]|\{\d*(?:,\d*)?\})[+?]?")


def to_oniguruma(pattern: str) -> str:
    """A pattern of tiktoken's for Hugging Face's tokenizers. Raises ConvertError."""
    return _rewritten(
        pattern,
        lambda atom, interval: f"(?>{atom}{interval})",
        {"$": r"\z", "^": r"\A"},
    )


def from_oniguruma(pattern: str) -> str:
    """A pattern of Hugging Face's tokenizers for tiktoken. Raises ConvertError."""
    return _rewritten(
        pattern,
        lambda atom, interval: f"(?:{atom}{interval})+",
        {"$": r"(?=\n|\z)", "^": r"(?:(?<=\n)|\A)"},
    )


def _rewritten(pattern: str, repeat: Callable[[str, str], str], anchors: dict[str, str]) -> str:
    out: list[str] = []
    openings: list[int] = []  # places in `out` where groups began that are still open
    atom = 0  # place in `out` where what a repetition repeats begins
    at = 0
    while at < len(pattern):
        character = pattern[at]
        if match := _ESCAPE.match(pattern, at):
            atom, piece = len(out), match[0]
        elif character == "[":
            atom, piece = len(out), _character_class(pattern, at)
        elif character == "(":
            piece = _opening(pattern, at)
            openings.append(len(out))
        elif character == ")":
            if not openings:
                raise ConvertError(f"the split pattern {pattern[:60]!r} closes a group too many")
            atom, piece = openings.pop(), character
        elif character in "*+?{" and (match := _REPEAT.match(pattern, at)):
            if match["keep"]:
                out[atom:] = [repeat("".join(out[atom:]), match["interval"])]
                at = match.end()
                continue
            piece = match[0]
        else:
            atom, piece = len(out), anchors.get(character, character)
        if character in "\\[":
            at += len(piece)
        else:
            at += 1 if character in anchors else len(piece)
        out.append(piece)
    return "".join(out)


def _opening(pattern: str, at: int) -> str:
    match = _OPENING.match(pattern, at)
    assert match is not None, "an opening bracket is there"
    if (match["options"] or "").strip("i") or pattern[match.end() - 1] == "?":
        raise ConvertError(
            f"the split pattern has {pattern[at : at + 6]!r} at {at}; of such groups only (?i: "
            "means the same in both engines"
        )
    if match[0] == "(" and pattern[at + 1 : at + 2] == "?":
        raise ConvertError(f"the split pattern has {pattern[at : at + 6]!r} at {at}; unknown here")
    return match[0]


def _character_class(pattern: str, at: int) -> str:
    """The class that begins at `at`, classes inside it included."""
    depth, end = 0, at
    while end < len(pattern):
        character = pattern[end]
        if character == "\\":
            end += 2
            continue
        depth += {"[": 1, "]": -1}.get(character, 0)
        end += 1
        if depth == 0:
            return pattern[at:end]
        if depth == 1 and character == "[" and end - at == 1:
            end += pattern[end : end + 1] == "^"
            end += pattern[end : end + 1] == "]"  # the first one is a character
    raise ConvertError(f"the split pattern {pattern[:60]!r} opens a class and does not close it")
