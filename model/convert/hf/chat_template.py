"""Chat templates of Hugging Face folders, if they have the same meaning in logitd.

logitd renders a template with the messages and the end-of-text token, but without tools and without
a beginning-of-text token (`model/text/chat_template.py`). A template that needs more is not
imported, and a note gives the reason: a conversation in a format that the model did not learn would
only seem to work.
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
    """Add the folder's chat template to `foreign`, or a note with the reason why it cannot be
    used."""
    config = object_beside(folder, TOKENIZER_CONFIG)
    source = config.get("chat_template")
    if (folder / TEMPLATE).is_file():
        source = source_text(folder / TEMPLATE, CONFIG_BYTES)
    if not isinstance(source, str):
        return foreign
    if reason := _reason(source, foreign, config):
        note = f"the chat template is not imported: {reason}"
        return replace(foreign, notes=(*foreign.notes, note))
    return replace(foreign, chat_template=source)


def _reason(source: str, foreign: ForeignTokenizer, config: Mapping[str, Any]) -> str | None:
    begins_as_it_ends = bool(config) and config.get("bos_token") == config.get("eos_token")
    if re.search(r"\bbos_token\b", source) and not begins_as_it_ends:
        return "it uses bos_token, but vocabularies of logitd have only an end of text"
    if re.search(r"\beos_token\b", source) and foreign.tokenizer.end_of_text is None:
        return "it uses eos_token, but none is known"
    try:
        template = ChatTemplate(source)
        template.render([{"role": "user", "content": "Hi"}], foreign.tokenizer)
    except ChatTemplateError as error:
        return str(error)
    return None
