"""`tokenizer.json` of whole words (WordLevel), as a vocabulary of words.

Texts are cut as in the file: at white space, into words and marks, or by one regular expression.
Unknown words become a token there and are rejected here. Byte pairs are in `hf/tokenizer.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.hf.added import AddedVocabulary, require_members
from logitd.model.convert.vocabulary.words import word_tokenizer
from logitd.model.text.pieces import WORDS_AND_MARKS
from logitd.model.text.tokenizer import Tokenizer

CUTS = {"Whitespace": WORDS_AND_MARKS, "WhitespaceSplit": r"\S+"}


def is_word_level(document: Mapping[str, Any]) -> bool:
    model = document.get("model")
    return isinstance(model, dict) and model.get("type") == "WordLevel"


def word_level_tokenizer(
    document: Mapping[str, Any], path: Path, added: AddedVocabulary
) -> tuple[Tokenizer, tuple[str, ...]]:
    """The tokenizer, and notes on it. Raises ConvertError."""
    require_members(document["model"], ("type", "vocab", "unk_token"), f"the model of {path}")
    if (decoder := document.get("decoder")) and decoder.get("type") != "Fuse":
        raise ConvertError(f"{path} joins words by {decoder.get('type')}, which is unknown here")
    vocabulary = document["model"].get("vocab")
    if (
        not isinstance(vocabulary, dict)
        or not vocabulary
        or not all(type(token_id) is int and token_id >= 0 for token_id in vocabulary.values())
    ):
        raise ConvertError(f"{path}: the vocabulary is not an object of words and ids")
    named = vocabulary | added.ids
    texts = {token_id: word for word, token_id in named.items()}
    if len(texts) != len(named):
        raise ConvertError(f"{path}: words of the vocabulary share ids")
    return word_tokenizer(
        texts,
        str(path),
        added.special,
        cut=_cut(document, path),
        end_of_text=added.end,
        added_tokens=added.ordinary,
        added_flags=added.flags,
    )


def _cut(document: Mapping[str, Any], path: Path) -> str:
    """The regular expression that cuts texts into words."""
    step = document.get("pre_tokenizer") or {}
    if step.get("type") == "Sequence" and len(step.get("pretokenizers", ())) == 1:
        step = step["pretokenizers"][0]
    if step.get("type") in CUTS:
        return CUTS[step["type"]]
    pattern = step.get("pattern")
    removed = step.get("behavior") == "Removed" and step.get("invert") is True
    if step.get("type") == "Split" and removed and isinstance(pattern, dict):
        source = pattern.get("Regex")
        if isinstance(source, str):
            return source
    raise ConvertError(
        f"{path} cuts texts by {step.get('type')}; for words, {', '.join(CUTS)} and a Split that "
        "keeps the matches of a regular expression can be imported"
    )
