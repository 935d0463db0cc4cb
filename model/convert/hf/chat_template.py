"""Chat templates of Hugging Face folders that have the same meaning here.

A template here gets messages and the end of text, and neither tools nor a beginning of text
(`model/text/chat_template.py`). One that needs more is left out with a note: a conversation written
in another way than the model learned would only look as if it worked.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from logitd.model.convert.foreign import ForeignTokenizer
from logitd.model.convert.hf.added import TOKENIZER_CONFIG
from logitd.model.convert.source_file import object_beside, source_text
from logitd.model.files import CONFIG_BYTES
from logitd.model.text.chat_template import ChatTemplate, ChatTemplateError

TEMPLATE = "chat_template.jinja"


def read_template(foreign: ForeignTokenizer, folder: Path) -> ForeignTokenizer:
    """`foreign` with the chat template of the folder, or with a note why it has none."""
    config = object_beside(folder, TOKENIZER_CONFIG)
    source = config.get("chat_template")
    if (folder / TEMPLATE).is_file():
        source = source_text(folder / TEMPLATE, CONFIG_BYTES)
    if not isinstance(source, str):
        return foreign
    if reason := _reason(source, foreign, config):
        note = f"the chat template is left out: {reason}"
        return replace(foreign, notes=(*foreign.notes, note))
    return replace(foreign, chat_template=source)


def _reason(source: str, foreign: ForeignTokenizer, config: Mapping[str, Any]) -> str | None:
    begins_as_it_ends = bool(config) and config.get("bos_token") == config.get("eos_token")
    if re.search(r"\bbos_token\b", source) and not begins_as_it_ends:
        return "it writes bos_token, and a vocabulary has only an end of text here"
    if re.search(r"\beos_token\b", source) and foreign.tokenizer.end_of_text is None:
        return "it writes eos_token, and none is known"
    try:
        template = ChatTemplate(source)
        template.render([{"role": "user", "content": "Hi"}], foreign.tokenizer)
    except ChatTemplateError as error:
        return str(error)
    return None
