"""Open text: opens the documents that the values of `--data` name.

  builtin:python         the documentation and sources of this Python; the default
  http://, https://      a file, which is downloaded once
  *.tokens               shards of a run, which need no tokenizing
  anything else          files, folders and globs (`files.py`)

All values together make up one text. Only the beginning of each file is read here.
"""

import os
import sysconfig
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from logitd.model.data.errors import DataError
from logitd.model.data.sources.document import Documents, Text, split_documents
from logitd.model.data.sources.download import Report, download, is_address
from logitd.model.data.sources.files import (
    documents_of,
    documents_of_all,
    each_once,
    holds_records,
    named_files,
)
from logitd.model.data.sources.python_text import python_text
from logitd.model.data.sources.read_options import AS_USUAL, ReadOptions
from logitd.model.files import is_utf8

PYTHON = "builtin:python"
SHARD = ".tokens"


def open_text(
    data: Sequence[str] = (),
    options: ReadOptions = AS_USUAL,
    *,
    licence: str | None = None,
    report: Report = lambda event: None,
) -> Text:
    """Open the text that `data` names. Addresses are downloaded now; files are read later. Raises
    DataError.

    licence  license of all texts except the built-in one, for the checkpoint's card; None if it is
             not stated
    """
    text_field, split_at = options.text_field, options.split_at
    words = list(dict.fromkeys(data)) or [PYTHON]
    for word in words:
        if not is_utf8(word):
            raise DataError(
                f"--data {word!a} is not valid UTF-8, so no record of the text can name it: rename "
                "it, or name its folder"
            )
    name = ", ".join(words[:3]) + (f" and {len(words) - 3} more" if len(words) > 3 else "")
    built_in = [python_text(Path(sysconfig.get_path("stdlib")))] if PYTHON in words else []
    unchanged = (text_field or "text", split_at) == ("text", None)
    if built_in and len(words) == 1:
        if licence is not None:
            raise DataError(
                f"--data-licence is {licence!r}, but the license of {PYTHON} is known: remove it"
            )
        if unchanged:
            return built_in[0]
    stated = licence or "not stated"
    addresses = [word for word in words if is_address(word)]
    others = [word for word in words if word != PYTHON and not is_address(word)]
    files = each_once(file for word in others for file in _files(word))
    if any(file.suffix == SHARD for file in files):
        texts = [*(str(file) for file in files if file.suffix != SHARD), *addresses]
        if not unchanged:
            raise DataError(
                f"--text-field and --split-at need text, but {name} is already tokenized: remove "
                "them"
            )
        if built_in or texts:
            raise DataError(
                f"{name}: shards (*{SHARD}) and text ({[*texts, PYTHON][0]}) cannot be trained on "
                "together: tokenize all of the text in one run, or name only shards"
            )
        return Text(name=name, licence=stated, documents=(), shards=files)
    downloads = [download(url, max_mb=options.max_download_mb, report=report) for url in addresses]
    paths = [*files, *(file.path for file in downloads)]
    if text_field not in ("text", "") and not any(map(holds_records, paths)):
        raise DataError(
            f"--text-field {text_field} needs JSON, CSV or Parquet, but {name} has only plain "
            "text: remove the flag"
        )
    documents = Documents(
        *(partial(iter, text.documents) for text in built_in),
        *(partial(documents_of, file.path, file.url, text_field) for file in downloads),
        partial(documents_of_all, files, text_field),
    )
    if split_at:
        documents = Documents(partial(split_documents, documents, split_at))
    if next(iter(documents), None) is None:
        raise DataError(f"{name}: all of the {len(paths)} files are empty")
    licences = [*(text.licence for text in built_in), *([stated] if paths else [])]
    return Text(
        name=name,
        licence="; ".join(dict.fromkeys(licences)),
        documents=documents,
        python=bool(built_in) and not split_at,
        downloads=[file.record() for file in downloads],
    )


def _files(word: str) -> list[Path]:
    if word.startswith("builtin:"):
        raise DataError(f"{word} is not built in; the only built-in text is {PYTHON}")
    if "://" in word:
        raise DataError(f"{word} is neither an http nor an https address: download the file first")
    if os.path.isfile(Path(word) / f"train{SHARD}"):  # unlike Path's, accepts a name of any length
        return sorted(Path(word).glob(f"*{SHARD}"))
    try:
        return named_files(word)
    except DataError as error:
        if "," not in word:
            raise
        raise DataError(f"{error}: to name several, repeat --data") from error
