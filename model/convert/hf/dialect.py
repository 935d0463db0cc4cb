"""Split patterns: translates them between two dialects of regular expressions.

tiktoken uses the Rust engine fancy-regex; Hugging Face's tokenizers use Oniguruma with Ruby's
syntax. These constructs in split patterns differ between the two:

  X{1,2}+   in fancy-regex: one or two, without backtracking; in Ruby: one or two, repeated
  $ and ^   in fancy-regex: the ends of the text; in Ruby: the ends of each line
  a(?i)b|c  in fancy-regex: ab or c; in Ruby: ab or ac
  (?s: (?m: the dot matches line breaks, too: (?s: in fancy-regex, (?m: in Ruby

A translated pattern has the same meaning as the original. Patterns that cannot be translated are
refused. The engines use different versions of Unicode, so a recently added character may be a
letter in only one of the engines.
"""

import re
from collections.abc import Callable

from logitd.model.convert.foreign import ConvertError

_ESCAPE = re.compile(r"\\(?:[pPxuN]\{[^}]*\}|.)", re.DOTALL)
_OPENING = re.compile(r"\((?:\?(?:[:=!>]|<[=!]|(?P<options>[a-zA-Z-]+)[:)]))?")
_REPEAT = re.compile(r"(?P<interval>\{\d+(?:,\d*)?\})(?P<keep>\+)|(?:[*+?]|\{\d*(?:,\d*)?\})[+?]?")


def to_oniguruma(pattern: str) -> str:
    """Translate a split pattern from tiktoken's dialect to the dialect of Hugging Face's
    tokenizers. Raises ConvertError."""
    return _rewritten(
        pattern,
        lambda atom, interval: f"(?>{atom}{interval})",
        {"$": r"\z", "^": r"\A"},
    )


def from_oniguruma(pattern: str) -> str:
    """Translate a split pattern from the dialect of Hugging Face's tokenizers to tiktoken's. Raises
    ConvertError."""
    return _rewritten(
        pattern,
        lambda atom, interval: f"(?:{atom}{interval})+",
        {"$": r"(?=\n|\z)", "^": r"(?:(?<=\n)|\A)"},
    )


def _rewritten(pattern: str, repeat: Callable[[str, str], str], anchors: dict[str, str]) -> str:
    out: list[str] = []
    openings: list[int] = []  # places in `out` at which open groups begin
    atom = 0  # place in `out` at which the operand of a repetition begins
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
                raise ConvertError(f"the split pattern {pattern[:60]!r} has an unmatched )")
            atom, piece = openings.pop(), character
        elif character in "*+?{" and (match := _REPEAT.match(pattern, at)):
            if match["keep"]:
                out[atom:] = [repeat("".join(out[atom:]), match["interval"])]
                at = match.end()
                continue
            piece = match[0]
        else:
            atom, piece = len(out), anchors.get(character, character)
        at += 1 if character in anchors else len(piece)
        out.append(piece)
    return "".join(out)


def _opening(pattern: str, at: int) -> str:
    match = _OPENING.match(pattern, at)
    assert match is not None, "an opening bracket is there"
    if (match["options"] or "").strip("i") or pattern[match.end() - 1] == "?":
        raise ConvertError(
            f"the split pattern has {pattern[at : at + 6]!r} at index {at}; the only "
            "group option that can be translated is (?i:"
        )
    if match["options"] and match[0].endswith(")") and at:
        raise ConvertError(
            f"the split pattern has {match[0]!r} at index {at}: behind it, | means different "
            "things in the two dialects; write (?i:...) instead"
        )
    if match[0] == "(" and pattern[at + 1 : at + 2] == "?":
        raise ConvertError(
            f"the split pattern has {pattern[at : at + 6]!r} at index {at}, which is not supported"
        )
    return match[0]


def _character_class(pattern: str, at: int) -> str:
    """The text of the character class that begins at index `at` of the pattern, including nested
    classes."""
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
            end += pattern[end : end + 1] == "]"  # a "]" in the first place is a character
    raise ConvertError(f"the split pattern {pattern[:60]!r} has an unclosed character class")
