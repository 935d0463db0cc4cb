"""Special tokens of a Hugging Face folder: roles such as `eos_token`, and tokens without a role.

The files take precedence over each other as in transformers. `special_tokens_map.json` takes
precedence over `tokenizer_config.json`, except over the text of a role that only some models have.
The whole file is ignored if `tokenizer_config.json` has `added_tokens_decoder`.
Both may list tokens without a role in `extra_special_tokens`, which older folders call
`additional_special_tokens`. If that member is an object instead of a list, its keys are roles.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.source_file import member, object_beside

TOKENIZER_CONFIG, NAMES = "tokenizer_config.json", "special_tokens_map.json"
DECODER = "added_tokens_decoder"

OLDER, EXTRA = "additional_special_tokens", "extra_special_tokens"
SPECIFIC = "model_specific_special_tokens"
LISTS = (OLDER, EXTRA, SPECIFIC)
"""Members that name tokens without a role, or roles that only some models have."""
ROLES = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
)
"""Roles that all tokenizers of transformers have. A model may have others, as `image_token`."""
MEMBERS = frozenset(
    ("__type", "id", "content", "single_word", "lstrip", "rstrip", "normalized", "special")
)
"""Known members of an added token in the files."""


@dataclass(frozen=True)
class SpecialToken:
    """A special token as a file names it. `members` is empty if the file has only its text."""

    text: str
    members: Mapping[str, Any]


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens that the files of a folder name.

    roles   tokens with a role, by role. The text of a token may be empty
    others  tokens without a role
    """

    roles: Mapping[str, SpecialToken]
    others: tuple[SpecialToken, ...]

    def named(self) -> Iterator[tuple[str, SpecialToken]]:
        """All tokens that have a text, each with its role or the name of the list."""
        for name, token in (*self.roles.items(), *((EXTRA, token) for token in self.others)):
            if token.text:
                yield name, token


def read_special_tokens(folder: Path | None) -> SpecialTokens:
    """Read the special tokens that the files of a folder name. Raises ConvertError."""
    where = str((folder or Path()) / TOKENIZER_CONFIG)
    config, later = object_beside(folder, TOKENIZER_CONFIG), dict[str, Any]()
    if config.get(DECODER) is None and (later := object_beside(folder, NAMES)):
        where = f"{where} or {NAMES}"
    apart = dict(member(config, SPECIFIC, dict, where))
    others: list[Any] | None = None
    first = config.get(EXTRA) or config.get(OLDER, config.get(EXTRA))
    for extra in (first, later.get(EXTRA)):
        if isinstance(extra, dict):
            apart |= extra
            others = None
        elif extra is not None:
            others = [*(others or ()), *member({EXTRA: extra}, EXTRA, list, where)]
    if others is None:
        others = member(later, OLDER, list, where)
    found = {role: (config | later).get(role) for role in ROLES}
    texts = {name: value for name, value in config.items() if isinstance(value, str)}
    further = (config | later | texts).items()
    found |= {name: value for name, value in further if is_further_role(name)}
    return SpecialTokens(
        roles={
            role: _token(value, role, where)
            for role, value in (found | apart).items()
            if value is not None
        },
        others=tuple(_token(value, EXTRA, where) for value in others),
    )


def is_further_role(name: str) -> bool:
    """True if a member of this name gives a token a role that only some models have."""
    return name.endswith("_token") and not name.startswith("add_") and name not in ROLES


def _token(value: Any, name: str, where: str) -> SpecialToken:
    members: Mapping[str, Any] = {}
    if isinstance(value, dict):
        members = require_members(value, MEMBERS, f"{name} of {where}")
        value = members.get("content")
    if not isinstance(value, str):
        raise ConvertError(f"{where}: {name} is {value!r:.60}; expected the text of a token")
    return SpecialToken(value, members)


def require_members(part: Any, known: Collection[str], where: str) -> Mapping[str, Any]:
    """Return `part` if it is a JSON object whose members are all known or null. Otherwise, raise
    ConvertError."""
    if not isinstance(part, dict):
        raise ConvertError(f"{where} is {part!r:.60}; expected an object")
    for name, value in part.items():
        if name not in known and value is not None:
            raise unknown_member(where, name, value)
    return part


def unknown_member(where: str, name: str, value: Any) -> ConvertError:
    return ConvertError(
        f"{where}: {name} is {value!r:.60}; this member is unknown and may change ids. Remove it "
        "if you know that it does not"
    )
