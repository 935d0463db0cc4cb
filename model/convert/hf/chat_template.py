"""Chat templates of Hugging Face folders, if they have the same meaning in logitd.

In transformers, a template sees the special tokens of the folder by their roles, such as
`bos_token`. In logitd it sees only the end of text (`model/text/chat_template.py`). So an imported
template begins with a line that sets the roles it uses. A template that needs more, such as the
time, is not imported, and a note gives the reason: a conversation in a format that the model did
not learn would only seem to work.

Of several templates, transformers uses the one with the name "default" if there are no tools.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from logitd.model.convert.foreign import ForeignTokenizer
from logitd.model.convert.hf.special_tokens import (
    ROLES,
    TOKENIZER_CONFIG,
    SpecialTokens,
    read_special_tokens,
)
from logitd.model.convert.source_file import object_beside, source_text
from logitd.model.files import CONFIG_BYTES
from logitd.model.text.chat_template import ChatTemplate, ChatTemplateError

TEMPLATE, FURTHER = "chat_template.jinja", "additional_chat_templates"
DEFAULT = "default"
FUNCTIONS = ("strftime_now", "lipsum", "cycler", "joiner")
"""Functions that a template has in transformers, but not in logitd."""


def read_template(foreign: ForeignTokenizer, folder: Path) -> ForeignTokenizer:
    """Add the folder's chat template to `foreign`, or a note with the reason why it cannot be
    used."""
    sources = _sources(folder)
    if not sources:
        return foreign
    try:
        template = _template(sources, foreign, read_special_tokens(folder))
    except ChatTemplateError as error:
        note = f"the chat template is not imported: {error}"
        return replace(foreign, notes=(*foreign.notes, note))
    notes = list(foreign.notes)
    if others := [repr(name) for name in sources if name != DEFAULT]:
        notes.append(
            f"of several chat templates, only {DEFAULT!r} is imported, not {', '.join(others)}"
        )
    return replace(foreign, chat_template=template, notes=tuple(notes))


def _sources(folder: Path) -> Mapping[str, Any]:
    """The templates of a folder by name. Files take precedence over the configuration."""
    further = {path.stem: path for path in sorted((folder / FURTHER).glob("*.jinja"))}
    paths = {DEFAULT: folder / TEMPLATE, **further}
    texts = {
        name: source_text(path, CONFIG_BYTES) for name, path in paths.items() if path.is_file()
    }
    if texts:
        return texts
    given = object_beside(folder, TOKENIZER_CONFIG).get("chat_template")
    if isinstance(given, list) and all(isinstance(each, dict) for each in given):
        return {str(each.get("name")): each.get("template") for each in given}
    if isinstance(given, dict):
        return given
    return {} if given is None else {DEFAULT: given}


def _template(
    sources: Mapping[str, Any], foreign: ForeignTokenizer, special_tokens: SpecialTokens
) -> str:
    """The template that transformers uses without tools, with the roles that it reads. Raises
    ChatTemplateError if it has another meaning in logitd."""
    if DEFAULT not in sources:
        raise ChatTemplateError(f"none of {', '.join(map(repr, sources))} is named {DEFAULT!r}")
    source = sources[DEFAULT]
    if not isinstance(source, str):
        raise ChatTemplateError(f"it is {source!r:.60}; expected a text")
    read = ChatTemplate(source).variables()
    if lacking := [name for name in FUNCTIONS if name in read]:
        raise ChatTemplateError(f"it uses {', '.join(lacking)}, which logitd does not have")
    set_roles = "".join(_set_roles(read, foreign, special_tokens))
    template = ChatTemplate(f"{set_roles}\n{source}" if set_roles else source)
    template.render([{"role": "user", "content": "Hi"}], foreign.tokenizer)
    return template.source


def _set_roles(
    read: set[str], foreign: ForeignTokenizer, special_tokens: SpecialTokens
) -> Iterator[str]:
    """Yield a statement for each role among the variables `read` that has another value in
    logitd."""
    tokenizer = foreign.tokenizer
    ends = {"bos_token", "eos_token"} if foreign.end_known else set()
    for role in sorted(read & {*ROLES, *special_tokens.roles}):
        token = special_tokens.roles.get(role)
        if token is None:
            # The end of text would stand for a token that the folder does not name.
            if role in ("bos_token", "eos_token"):
                yield f"{{% set {role} = undefined %}}"
            continue
        if token.text and token.text not in tokenizer.special_tokens | tokenizer.added_tokens:
            raise ChatTemplateError(
                f"it uses {role}, which is {token.text!r}, but the vocabulary lacks this token"
            )
        if role not in ends or token.text != tokenizer.end_of_text_name:
            yield f"{{% set {role} = {json.dumps(token.text, ensure_ascii=False)} %}}"
