"""`tokenizer.json`: reads vocabularies of Hugging Face's tokenizers as ranks and a split pattern.

Two types are supported. Byte-level BPE may have one split pattern and added tokens (`added.py`), if
its merges give the same encoding as ranks (`merges.py`). Whole words (WordLevel) may be split at
white space, into words and punctuation, or by one regular expression. SentencePiece's BPE, other
models, several splits in a row, normalizers, and unknown members are refused, because they could
change ids. The imported BPE is compared with the definition of BPE on a text.

Ids stay the same unless the source leaves ids below the last ordinary token unused. In that case,
the gaps are closed, and `ForeignTokenizer.order` has the source's ids.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import regex

from logitd.model.convert.foreign import ConvertError, ForeignTokenizer, naming
from logitd.model.convert.hf.added import AddedVocabulary, read_added
from logitd.model.convert.hf.dialect import from_oniguruma
from logitd.model.convert.hf.folder import CONFIG
from logitd.model.convert.hf.merges import check_merges, merge_piece, unwritten, written
from logitd.model.convert.hf.special_tokens import TOKENIZER_CONFIG, require_members
from logitd.model.convert.probe import probe_text
from logitd.model.convert.source_file import member, object_beside, source_object
from logitd.model.convert.vocabulary.words import WHOLE_TEXT, with_all_bytes, word_tokenizer
from logitd.model.text.pieces import WORDS_AND_MARKS
from logitd.model.text.tokenizer import END_OF_TEXT, Tokenizer

TOKENIZER = "tokenizer.json"

MEMBERS = (
    *("version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer"),
    *("post_processor", "decoder", "model"),
)
"""Known members of a `tokenizer.json`. `truncation` and `padding` do not affect the ids of a single
text."""
MODEL_MEMBERS = {
    "BPE": (
        *("type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"),
        *("fuse_unk", "byte_fallback", "ignore_merges", "vocab", "merges"),
    ),
    "WordLevel": ("type", "vocab", "unk_token"),
}
CUT_MEMBERS = {
    "ByteLevel": ("type", "add_prefix_space", "trim_offsets", "use_regex"),
    "Split": ("type", "pattern", "behavior", "invert"),
}
AROUND = ("TemplateProcessing", "BertProcessing", "RobertaProcessing")
"""Types of post-processors that add special tokens before or after each text."""
MOST_TOKEN_BYTES = 2048
"""Maximum number of bytes of a token. The time to find a token's merges grows with the square of
its length. Tokens of published vocabularies have at most 128 bytes."""

_NESTED = re.compile(r"\[(?:\\.|[^\]\\])*(?:\[|&&)")
"""A character class with another class in it, which `regex` reads as characters."""
WORD_CUTS = {"Whitespace": WORDS_AND_MARKS, "WhitespaceSplit": r"\S+"}

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Split pattern of the ByteLevel pre-tokenizer."""

QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Split pattern of Qwen2's tokenizer. Llama 3's pattern differs only in that it keeps up to three
digits together."""
PATTERNS = {
    "GPT2Tokenizer": GPT2_PATTERN,
    "GPTNeoXTokenizer": GPT2_PATTERN,
    "Qwen2Tokenizer": QWEN2_PATTERN,
}
"""Split patterns of these classes in transformers 5, which ignores those of `tokenizer.json`."""


def read_tokenizer(path: Path, *, skip_normalizer: bool) -> ForeignTokenizer:
    """Read a `tokenizer.json`. A normalizer changes texts before they are encoded; with
    `skip_normalizer`, it is ignored instead of refused. Raises ConvertError."""
    document = source_object(path)
    return tokenizer_of_document(
        document, path, skip_normalizer=skip_normalizer, folder=path.parent
    )


def tokenizer_class(folder: Path) -> str | None:
    """The class of the tokenizer that transformers 5 chooses in a folder, without the ending
    "Fast"; None if the folder states none."""
    if object_beside(folder, CONFIG).get("model_type") == "qwen2":
        return "Qwen2Tokenizer"
    stated = object_beside(folder, TOKENIZER_CONFIG).get("tokenizer_class")
    return stated.removesuffix("Fast") if isinstance(stated, str) else None


def tokenizer_of_document(
    document: Mapping[str, Any],
    path: Path,
    *,
    skip_normalizer: bool,
    folder: Path | None,
    pattern: str | None = None,
) -> ForeignTokenizer:
    """Read the parsed contents of a `tokenizer.json`. Error messages name `path`. `folder` has the
    other files that describe the tokenizer. `pattern` is the split pattern of byte-level BPE, if
    the contents do not state it. Raises ConvertError."""
    require_members(document, MEMBERS, str(path))
    model = _model(document, path)
    vocabulary = _vocabulary(model, path)
    pairs = _pairs(model, path)
    merged = {left + right for left, right in pairs}
    merged |= {token for token in vocabulary if len(token) == 1}
    added = read_added(document, vocabulary, merged, path, folder)
    notes = [
        *_check_normalizer(document, path, skip_normalizer),
        *added.notes,
        *_processor_notes(document.get("post_processor"), path),
    ]
    known_end = added.end is not None
    if model.get("type") == "WordLevel":
        words, assumed = _word_level_tokenizer(document, vocabulary, path, added)
        return ForeignTokenizer(tokenizer=words, notes=(*notes, *assumed), end_known=known_end)
    if pattern is None:
        pattern = _pattern(document, path)
    stated = None if folder is None else tokenizer_class(folder)
    if PATTERNS.get(stated or "", pattern) != pattern:
        notes.append(
            f"texts are split by the pattern of {path.name}, as in transformers 4; transformers 5 "
            f"uses that of {stated} instead, so it gives other ids"
        )
    met = added.ordinary.keys() & merged
    ranks = _ordinary(vocabulary, added.ids.keys() - met, path)
    apart = {name: token_id for name, token_id in added.ids.items() if name not in met}
    order = _order(ranks, apart, path)
    special, extra = dict(added.special), dict(added.ordinary)
    if order is not None:
        ours = {source: token_id for token_id, source in enumerate(order)}
        ranks = {token: rank for rank, token in enumerate(ranks)}
        special = {name: ours[token_id] for name, token_id in special.items()}
        extra = {name: ours[token_id] for name, token_id in extra.items()}
        notes.append(
            "ids differ from the source's, because some of those have no token: here ordinary "
            "tokens come first, in the same order"
        )
    size = max([*ranks.values(), *special.values(), *extra.values()]) + 1
    complete = with_all_bytes(ranks, size)
    if (missing := len(complete) - len(ranks)) and model.get("unk_token"):
        raise ConvertError(
            f"{path}: {missing} of the 256 bytes are not tokens. Hugging Face replaces them with "
            f"{model['unk_token']!r}, but logitd encodes every text without loss"
        )
    ranks = complete
    check_merges(model, pairs, ranks, pattern, path)
    with naming(path):
        tokenizer = Tokenizer(
            ranks=ranks,
            pattern=pattern,
            special_tokens=special,
            vocab_size=size,
            added_tokens=extra,
            added_flags=added.flags,
            end_of_text_name=added.end or END_OF_TEXT,
        )
    foreign = ForeignTokenizer(tokenizer=tokenizer, order=order, notes=notes, end_known=known_end)
    _try(foreign, model, pairs, path)
    return foreign


def _check_normalizer(document: Mapping[str, Any], path: Path, skip: bool) -> list[str]:
    normalizer = document.get("normalizer")
    if normalizer is None or normalizer == {"type": "Sequence", "normalizers": []}:
        return []
    kind = normalizer.get("type") if isinstance(normalizer, dict) else normalizer
    if not skip:
        raise ConvertError(
            f"{path} has the normalizer {kind}, which changes texts before they are encoded, but "
            "logitd has none. --skip-normalizer imports the tokenizer without it; texts that the "
            "normalizer changes then get different ids"
        )
    return [f"the source's normalizer {kind} is not imported: texts are encoded unchanged"]


def _model(document: Mapping[str, Any], path: Path) -> dict[str, Any]:
    model = member(document, "model", dict, path)
    kind = model.get("type", "BPE")
    if kind not in [*MODEL_MEMBERS]:
        raise ConvertError(
            f"{path}: the tokenizer's model is {kind}; only byte-level BPE and WordLevel can be "
            "imported"
        )
    require_members(model, MODEL_MEMBERS[kind], f"the model of {path}")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise ConvertError(f"{path}: {name} is {model[name]!r}, which is not supported")
    if model.get("byte_fallback") is True:
        raise ConvertError(
            f"{path} has SentencePiece's BPE (byte_fallback), whose tokens consist of characters "
            "instead of bytes: it cannot be converted to ranks"
        )
    return model


def _vocabulary(model: Mapping[str, Any], path: Path) -> dict[str, int]:
    vocabulary = member(model, "vocab", dict, f"the model of {path}")
    if not vocabulary:
        raise ConvertError(f"{path}: the vocabulary is empty")
    for token, token_id in vocabulary.items():
        if type(token_id) is not int or token_id < 0:
            raise ConvertError(
                f"{path}: the id of the token {token!r:.60} in vocab is {token_id!r:.60}; expected "
                "an integer, at least 0"
            )
    if len(set(vocabulary.values())) != len(vocabulary):
        raise ConvertError(f"{path}: some tokens of the vocabulary share an id")
    return vocabulary


def _ordinary(
    vocabulary: Mapping[str, int], apart: Collection[str], path: Path
) -> dict[bytes, int]:
    ordinary: dict[bytes, int] = {}
    for name, token_id in sorted(vocabulary.items(), key=lambda item: item[1]):
        if name in apart:
            continue
        try:
            token = unwritten(name)
        except KeyError:
            token = b""
        if not token:
            raise ConvertError(
                f"{path}: the token {name!r} (id {token_id}) cannot be converted to bytes, so the "
                "vocabulary is not byte-level"
            )
        if len(name) > MOST_TOKEN_BYTES:
            raise ConvertError(
                f"{path}: the token {name[:40]!r}... has {len(name):,} bytes; the limit is "
                f"{MOST_TOKEN_BYTES:,}"
            )
        ordinary[token] = token_id
    return ordinary


def _order(ordinary: Mapping[bytes, int], added: Mapping[str, int], path: Path) -> list[int] | None:
    """The source's id for each id of the imported vocabulary. None if every id below the last
    ordinary token has a token, because then all ids stay the same."""
    order = [*ordinary.values(), *sorted(added.values())]
    if len(set(order)) != len(order):
        raise ConvertError(f"{path}: an added token has the id of another token")
    last = max(ordinary.values(), default=0)
    # Count the ids instead of listing them, because an id may be any number.
    below = sum(0 <= token_id < last for token_id in order)
    return order if below < last else None


def _pattern(document: Mapping[str, Any], path: Path) -> str:
    steps = _cuts(document, path)
    kinds = [step.get("type") for step in steps]
    if kinds not in (["ByteLevel"], ["Split", "ByteLevel"]):
        raise ConvertError(
            f"{path} splits texts with {' and then '.join(map(str, kinds))}; only one Split by a "
            "regular expression followed by ByteLevel, or ByteLevel alone, can be imported"
        )
    for step in steps:
        require_members(step, CUT_MEMBERS[step["type"]], f"{step['type']} of {path}")
    level, split = steps[-1], steps[0] if len(steps) == 2 else None
    if (decoder := member(document, "decoder", dict, path)) and decoder.get("type") != "ByteLevel":
        raise ConvertError(
            f"{path} decodes with {decoder.get('type')}; byte-level BPE needs the decoder ByteLevel"
        )
    if level.get("add_prefix_space"):
        raise ConvertError(
            f"{path} adds a space before each text (add_prefix_space), which is not supported"
        )
    if split is None:
        return GPT2_PATTERN if level.get("use_regex", True) else WHOLE_TEXT
    if level.get("use_regex", True):
        raise ConvertError(
            f"{path} splits texts twice, by a Split and by ByteLevel's own pattern; only one of "
            "them can be imported"
        )
    behavior = (split.get("behavior"), split.get("invert", False))
    if behavior not in (("Isolated", False), ("Removed", True)):
        raise ConvertError(
            f"{path} has a Split with the behavior {split.get('behavior')} and invert "
            f"{split.get('invert', False)}; only Isolated, or Removed with invert, can be imported"
        )
    source = split.get("pattern")
    if not isinstance(source, dict) or not isinstance(source.get("Regex"), str):
        raise ConvertError(f"{path} splits texts at {source!r}, which is not a regular expression")
    return from_oniguruma(source["Regex"])


def _cuts(document: Mapping[str, Any], path: Path) -> list[dict[str, Any]]:
    """The steps that split texts: the pre-tokenizer, or its steps if it is a sequence."""
    outer = member(document, "pre_tokenizer", dict, path)
    where = f"pre_tokenizer of {path}"
    steps = member(outer, "pretokenizers", list, where) or [outer]
    for step in steps:
        if not isinstance(step, dict):
            raise ConvertError(f"{where}: a step is {step!r:.60}; expected an object")
    return steps


def _pairs(model: Mapping[str, Any], path: Path) -> dict[tuple[str, str], int]:
    places: dict[tuple[str, str], int] = {}
    for place, merge in enumerate(member(model, "merges", list, f"the model of {path}")):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or [type(part) for part in parts] != [str, str]:
            raise ConvertError(f"{path}: the merge {merge!r:.60} does not have two parts")
        places[parts[0], parts[1]] = place
    return places


def _processor_notes(processor: Any, path: Path) -> Iterator[str]:
    kind = processor.get("type") if isinstance(processor, dict) else processor
    if isinstance(processor, dict) and kind == "Sequence":
        for each in member(processor, "processors", list, f"post_processor of {path}"):
            yield from _processor_notes(each, path)
    elif kind in AROUND and _adds_tokens(processor):
        yield (
            f"the source adds special tokens to each text ({kind}), but logitd does not: put "
            "their ids into the prompt if the model needs them"
        )
    elif kind not in (None, "ByteLevel", *AROUND):
        raise ConvertError(
            f"{path}: post_processor is {kind!r:.60}, which may change the ids; it is not supported"
        )


def _adds_tokens(processor: Mapping[str, Any]) -> bool:
    """False for a template that has only the text, as transformers writes for a tokenizer without
    special tokens."""
    single = processor.get("single")
    return not isinstance(single, list) or any(
        isinstance(piece, dict) and "SpecialToken" in piece for piece in single
    )


def _try(
    foreign: ForeignTokenizer,
    model: Mapping[str, Any],
    pairs: Mapping[tuple[str, str], int],
    path: Path,
) -> None:
    """Raise ConvertError unless the probe text gets the same ids as in the source. Characters that
    the vocabulary lacks are left out of the text."""
    tokenizer, text = foreign.tokenizer, probe_text()
    if len(tokenizer.tokens) != len(tokenizer.ranks):  # the vocabulary lacks some characters
        text = "".join(
            character
            for character in text
            if all(bytes([byte]) in tokenizer.tokens for byte in character.encode())
        )
    with naming(path):  # its pattern may skip characters
        ids = tokenizer.encode(text)
    order = foreign.source_ids
    expected = list[int]()
    for part in tokenizer.added.split(text):
        if part.token_id is not None:
            expected.append(order[part.token_id])
            continue
        for piece in regex.findall(tokenizer.pattern, text[part.start : part.end]):
            expected += _ids_of_piece(written(piece.encode()), model, pairs)
    given = [order[token_id] for token_id in ids]
    if given != expected:
        place = next(
            (i for i, (a, b) in enumerate(zip(given, expected, strict=False)) if a != b),
            min(len(given), len(expected)),
        )
        begin = tokenizer.spans(ids, text)[min(place, len(ids) - 1)].start
        raise ConvertError(
            f"{path} cannot be converted to ranks: the ids of {text[begin : begin + 20]!r} begin "
            f"with {expected[place : place + 3]} according to its merges, "
            f"but with {given[place : place + 3]} according to the ranks"
        )


def _ids_of_piece(
    spelled: str, model: Mapping[str, Any], pairs: Mapping[tuple[str, str], int]
) -> list[int]:
    if model.get("ignore_merges") is True and spelled in model["vocab"]:
        return [model["vocab"][spelled]]
    return [model["vocab"][part] for part in merge_piece(spelled, pairs)]


def _word_level_tokenizer(
    document: Mapping[str, Any], vocabulary: Mapping[str, int], path: Path, added: AddedVocabulary
) -> tuple[Tokenizer, tuple[str, ...]]:
    """The tokenizer of a WordLevel vocabulary, and notes about it. Raises ConvertError."""
    if (decoder := member(document, "decoder", dict, path)) and decoder.get("type") != "Fuse":
        raise ConvertError(f"{path} decodes with {decoder.get('type')}; only Fuse can be imported")
    named = {**vocabulary, **added.ids}
    texts = {token_id: word for word, token_id in named.items()}
    if len(texts) != len(named):
        raise ConvertError(f"{path}: some words of the vocabulary share an id")
    return word_tokenizer(
        texts,
        str(path),
        added.special,
        cut=_word_cut(document, path),
        end_of_text=added.end,
        added_tokens=added.ordinary,
        added_flags=added.flags,
    )


def _word_cut(document: Mapping[str, Any], path: Path) -> str:
    steps = _cuts(document, path)
    step = steps[0] if len(steps) == 1 else member(document, "pre_tokenizer", dict, path)
    if step.get("type") in [*WORD_CUTS]:
        return WORD_CUTS[step["type"]]
    pattern = step.get("pattern")
    removed = step.get("behavior") == "Removed" and step.get("invert") is True
    if step.get("type") == "Split" and removed and isinstance(pattern, dict):
        source = pattern.get("Regex")
        if isinstance(source, str) and not _NESTED.search(source):
            return from_oniguruma(source)
    raise ConvertError(
        f"{path} splits texts with {step.get('type')}; for a vocabulary of words, only "
        f"{', '.join(WORD_CUTS)} and a Split that keeps the matches of a regular expression "
        "(without nested character classes) can be imported"
    )
