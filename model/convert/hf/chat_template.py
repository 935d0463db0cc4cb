"""Chat templates of Hugging Face folders, where they mean the same here.

A template here gets messages and the end of text, and neither tools nor a beginning of text
(`model/text/chat_template.py`). One that needs more is left out, and that is said: a conversation
that is written differently from what a model learned would only look as if it worked.
"""

import re
from dataclasses import replace
from pathlib import Path

from logitd.model.convert.foreign import ForeignTokenizer
from logitd.model.convert.hf.added import TOKENIZER_CONFIG
from logitd.model.convert.hf.folder import read_object
from logitd.model.convert.source_file import source_text
from logitd.model.files import CONFIG_BYTES
from logitd.model.text.chat_template import ChatTemplate, ChatTemplateError

TEMPLATE = "chat_template.jinja"


def read_template(foreign: ForeignTokenizer, folder: Path) -> ForeignTokenizer:
    """`foreign` with the chat template of the folder, or with a note why it has none."""
    source = _source(folder)
    if source is None:
        return foreign
    if reason := _reason(source, foreign, folder):
        note = f"the chat template is left out: {reason}"
        return replace(foreign, notes=(*foreign.notes, note))
    return replace(foreign, chat_template=source)


def _source(folder: Path) -> str | None:
    if (folder / TEMPLATE).is_file():
        return source_text(folder / TEMPLATE, CONFIG_BYTES)
    if not (folder / TOKENIZER_CONFIG).is_file():
        return None
    source = read_object(folder / TOKENIZER_CONFIG).get("chat_template")
    return source if isinstance(source, str) else None


def _begins_as_it_ends(folder: Path) -> bool:
    """Whether one token stands for both ends of a text, as it does here."""
    if not (folder / TOKENIZER_CONFIG).is_file():
        return False
    document = read_object(folder / TOKENIZER_CONFIG)
    return document.get("bos_token") == document.get("eos_token")


def _reason(source: str, foreign: ForeignTokenizer, folder: Path) -> str | None:
    """Why the template cannot be taken."""
    if re.search(r"\bbos_token\b", source) and not _begins_as_it_ends(folder):
        return "it writes bos_token, and a vocabulary has only an end of text here"
    if re.search(r"\beos_token\b", source) and foreign.tokenizer.end_of_text is None:
        return "it writes eos_token, and none is known"
    try:
        template = ChatTemplate(source)
        template.render([{"role": "user", "content": "Hi"}], foreign.tokenizer)
    except ChatTemplateError as error:
        return str(error)
    return None
