"""Added tokens of a Hugging Face folder, and the tokens that end a text.

The files have the same meaning as in transformers. `tokenizer.json` lists added tokens. The key
`added_tokens_decoder` of `tokenizer_config.json` may list more of them, and may change the flags of
those in `tokenizer.json`. Older folders have `added_tokens.json` instead, which may list more of
them, but changes none. The tokens that `special_tokens.py` reads are special.
`eos_token_id` is a number or a list. For this key, `generation_config.json` takes precedence over
`config.json`.

A member of `tokenizer_config.json` is refused, and the error names it, unless it is read here or in
`chat_template.py` or is known not to affect ids.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from logitd.model.convert.foreign import ConvertError, ForeignTokenizer
from logitd.model.convert.hf.folder import CONFIG
from logitd.model.convert.hf.special_tokens import (
    DECODER,
    LISTS,
    MEMBERS,
    ROLES,
    TOKENIZER_CONFIG,
    SpecialTokens,
    is_further_role,
    read_special_tokens,
    require_members,
    unknown_member,
)
from logitd.model.convert.source_file import member, object_beside
from logitd.model.text.added_tokens import Flag
from logitd.model.text.tokenizer import Tokenizer

ADDED, GENERATION = "added_tokens.json", "generation_config.json"

_DIGITS = re.compile(r"[0-9]{1,18}")
FLAGS: tuple[Flag, ...] = ("lstrip", "rstrip", "single_word")

NEUTRAL = frozenset(
    (
        *("tokenizer_class", "tokenizer_file", "tokenizer_type", "name_or_path", "auto_map"),
        *("vocab_file", "merges_file", "special_tokens_map_file", "transformers_version"),
        *("model_max_length", "max_length", "max_len", "truncation", "truncation_side", "stride"),
        *("truncation_strategy", "padding", "padding_side", "pad_to_multiple_of", "padding_size"),
        *("pad_token_type_id", "model_input_names", "return_token_type_ids", "processor_class"),
        *("return_attention_mask", "clean_up_tokenization_spaces", "errors", "legacy", "is_local"),
        *("from_slow", "local_files_only", "backend", "use_fast", "trust_remote_code", "revision"),
        *("spaces_between_special_tokens", "split_special_tokens", "sp_model_kwargs", "unk_id"),
        *("vocab_size", "trim_offsets", "device_map", "torch_dtype", "dtype", "_commit_hash"),
        *("use_default_system_prompt", "chat_template", "response_schema", "added_tokens_decoder"),
    )
)
"""Members of `tokenizer_config.json` that do not affect ids, or that are read elsewhere."""
NO_SAMPLING = frozenset(
    (
        *("_from_model_config", "transformers_version", "eos_token_id", "bos_token_id"),
        *("pad_token_id", "decoder_start_token_id", "do_sample", "use_cache", "max_length"),
        *("max_new_tokens", "cache_implementation", "return_dict_in_generate", "output_scores"),
        *("output_attentions", "output_hidden_states", "output_logits"),
    )
)
"""Members of `generation_config.json` that do not affect sampling."""


@dataclass(frozen=True)
class AddedVocabulary:
    """The added tokens of a vocabulary.

    special, ordinary  the source's ids of the special and the other added tokens, by text
    flags              flags of these tokens, by text
    end                the special token that ends a document, if a file names it
    notes              sentences for the user
    """

    special: Mapping[str, int]
    ordinary: Mapping[str, int]
    flags: Mapping[str, list[Flag]] = field(default_factory=dict)
    end: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def ids(self) -> dict[str, int]:
        return {**self.special, **self.ordinary}


def read_added(
    document: Mapping[str, Any],
    vocabulary: Mapping[str, int],
    merged: Collection[str],
    path: Path,
    folder: Path | None,
) -> AddedVocabulary:
    """Read the added tokens from a `tokenizer.json` and the other files in its folder. `vocabulary`
    has the ids of the ordinary tokens; `merged` are those that are single characters or results of
    merges. Raises ConvertError."""
    config = object_beside(folder, TOKENIZER_CONFIG)
    where = str((folder or path.parent) / TOKENIZER_CONFIG)
    notes = list(_check_config(config, where))
    entries = dict(_entries(member(document, "added_tokens", list, path), str(path)))
    special_tokens = read_special_tokens(folder)
    older = config.get(DECODER) is None
    source = str((folder or path.parent) / ADDED) if older else where
    for text, entry in _further(config, folder, special_tokens, source):
        known = entries.get(text, {"id": vocabulary.get(text, entry["id"])})
        if known["id"] != entry["id"]:
            raise ConvertError(
                f"{source} gives {text!r} the id {entry['id']}, but {path.name} gives it the id "
                f"{known['id']}"
            )
        entries[text] = entries.get(text, entry) if older else entry
    notes += _add_named(entries, special_tokens, vocabulary)
    for text in entries.keys() & merged:  # also found in ordinary text
        if vocabulary.get(text) == entries[text]["id"]:
            entries[text] = {**entries[text], "special": False}
    owners: dict[int, str] = {}
    for text, entry in entries.items():
        if owners.setdefault(entry["id"], text) != text:
            raise ConvertError(
                f"{path}: the added tokens {owners[entry['id']]!r} and {text!r} have the same id, "
                f"{entry['id']}"
            )
    special = {text: entry["id"] for text, entry in entries.items() if entry["special"]}
    eos = special_tokens.roles.get("eos_token")
    end = None if eos is None else eos.text
    if end not in special:
        ends = (owners[i] for i in _stated_ends(folder)[1] if i in owners)
        end = next((text for text in ends if text in special), None)
    return AddedVocabulary(
        special=special,
        ordinary={text: entry["id"] for text, entry in entries.items() if text not in special},
        flags={text: flags for text, entry in entries.items() if (flags := _flags(entry))},
        end=end,
        notes=tuple(notes),
    )


def _entries(tokens: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for token in tokens:
        entry = require_members(token, MEMBERS, f"an added token of {where}")
        text, token_id = entry.get("content"), entry.get("id")
        if not isinstance(text, str) or not text:
            raise ConvertError(
                f"{where}: content of an added token is {text!r:.60}; expected a text"
            )
        if type(token_id) is not int or token_id < 0:
            raise ConvertError(
                f"{where}: id of the added token {text!r:.60} is {token_id!r:.60}; expected an "
                "integer, at least 0"
            )
        special = entry.get("special") is True
        yield text, {"normalized": not special, **entry, "special": special}


def _further(
    config: Mapping[str, Any], folder: Path | None, special_tokens: SpecialTokens, where: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    decoder = config.get(DECODER)
    if decoder is None:
        special = {token.text for _, token in special_tokens.named()}
        older = object_beside(folder, ADDED)
        tokens = [{"content": t, "id": i, "special": t in special} for t, i in older.items()]
        yield from _entries(tokens, where)
        return
    if not isinstance(decoder, dict) or not all(isinstance(t, dict) for t in decoder.values()):
        raise ConvertError(f"{where}: {DECODER} must map ids to objects")
    yield from _entries(
        ({**token, "id": int(i) if _DIGITS.fullmatch(i) else i} for i, token in decoder.items()),
        where,
    )


def _add_named(
    entries: dict[str, dict[str, Any]],
    special_tokens: SpecialTokens,
    vocabulary: Mapping[str, int],
) -> Iterator[str]:
    """Make the tokens that are named as special tokens special. Those that are only in the
    vocabulary become added tokens. Yields a note for each token that is nowhere."""
    listed, absent = set(entries), set[str]()
    for name, token in special_tokens.named():
        text = token.text
        if text in listed:
            entries[text]["special"] = True
        elif text in vocabulary:
            entries[text] = {**token.members, "id": vocabulary[text], "special": True}
        elif text not in absent:
            absent.add(text)
            yield f"{name} is {text!r}, which the vocabulary lacks: it is ignored"


def _flags(entry: Mapping[str, Any]) -> list[Flag]:
    flags = [flag for flag in FLAGS if entry.get(flag) is True]
    if bool(entry.get("normalized")) == entry["special"]:
        flags.append("normalized" if entry["special"] else "unnormalized")
    return flags


def _check_config(config: Mapping[str, Any], where: str) -> Iterator[str]:
    for name, value in config.items():
        neutral = name in NEUTRAL or name in LISTS or name in ROLES or name.endswith("_token_id")
        if neutral or value in (None, False, "", [], {}):
            continue
        if name in ("add_bos_token", "add_eos_token"):
            yield (
                f"the source adds a special token to each text ({name}), but logitd does not: "
                "put its id into the prompt if the model needs it"
            )
        elif not is_further_role(name) or value is True:
            raise unknown_member(where, name, value)


def with_ends(foreign: ForeignTokenizer, folder: Path) -> ForeignTokenizer:
    """Add to a vocabulary the ids that end a text according to the model's folder. If no end is
    known, add a note. Raises ConvertError."""
    tokenizer, notes = foreign.tokenizer, list(foreign.notes)
    generation = object_beside(folder, GENERATION)
    if wishes := [
        f"{name} {value!r:.40}"
        for name, value in generation.items()
        if name not in NO_SAMPLING and value not in (None, False)
    ]:
        notes.append(f"{GENERATION} recommends {', '.join(wishes[:12])}: set it in requests")
    place, stated = _stated_ends(folder)
    order = foreign.source_ids if stated else ()
    ours = {source: token_id for token_id, source in enumerate(order)}
    if absent := [end for end in stated if end not in ours]:
        notes.append(f"eos_token_id of {place} has {absent}, which the vocabulary lacks")
    ends = [ours[end] for end in stated if end in ours]
    if ends:
        tokenizer = _ending(tokenizer, ends, known=foreign.end_known)
    if not tokenizer.ends:
        notes.append("no end of text is known: generation continues to max_tokens")
    return replace(foreign, tokenizer=tokenizer, notes=tuple(notes))


def _stated_ends(folder: Path | None) -> tuple[str, list[int]]:
    for name in (GENERATION, CONFIG):
        ends = object_beside(folder, name).get("eos_token_id")
        if ends is not None:
            ends = ends if isinstance(ends, list) else [ends]
            if not all(type(end) is int for end in ends):
                where = (folder or Path()) / name
                raise ConvertError(
                    f"{where}: eos_token_id is {ends!r:.60}; expected an id or a list of ids"
                )
            return name, ends
    return CONFIG, []


def _ending(tokenizer: Tokenizer, ends: list[int], *, known: bool) -> Tokenizer:
    """The tokenizer with `ends` as the ids that end a text. If `known` is False, the first special
    token among `ends` becomes the token that ends a document."""
    changes: dict[str, Any] = {"end_ids": ends}
    names = {token_id: name for name, token_id in tokenizer.special_tokens.items()}
    if not known and (named := next((names[end] for end in ends if end in names), None)):
        changes["end_of_text"] = named
    return Tokenizer.described({**tokenizer.description(), **changes}, tokenizer.ranks)
