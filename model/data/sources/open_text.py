"""Open text: from the arguments of `--data` to documents.

  builtin:python         the documentation and sources of this Python; what is read by default
  http://, https://      a file, fetched once
  *.tokens               shards that a run has tokenised, trained on as they are
  anything else          files, folders and globs (`files.py`)

Several arguments make one text with the documents of all of them. Reads only the beginning of each,
and does not split training from validation (`split.py`).
"""

import sysconfig
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from logitd.model.data.sources.document import Documents, Text, TextError
from logitd.model.data.sources.download import download, is_address
from logitd.model.data.sources.files import (
    documents_of,
    documents_of_all,
    each_once,
    holds_records,
    named_files,
)
from logitd.model.data.sources.progress import Report, unreported
from logitd.model.data.sources.python_text import python_text

BUILT_IN = "builtin:"

SHARD = ".tokens"


def open_text(
    data: Sequence[str] = (),
    *,
    text_field: str = "text",
    max_download_mb: int = 1000,
    licence: str = "not stated",
    report: Report = unreported,
) -> Text:
    """The text that the words of `data` name. Addresses are fetched now, files are read later.

    text_field  of JSON lines and Parquet, the field that is the text
    licence     of what is not built in, for the checkpoint's card
    """
    words = list(dict.fromkeys(data)) or [BUILT_IN + "python"]
    built_in = [_built_in(word) for word in words if word.startswith(BUILT_IN)]
    if built_in and len(words) == 1:
        return built_in[0]
    addresses = [word for word in words if is_address(word)]
    names = [word for word in words if not word.startswith(BUILT_IN) and not is_address(word)]
    files = each_once(file for name in names for file in _files(name))
    if any(file.suffix == SHARD for file in files):
        return _tokenised(words, files, licence)
    downloads = [download(url, max_mb=max_download_mb, report=report) for url in addresses]
    _check_field(text_field, words, [*files, *(file.path for file in downloads)])
    documents = Documents(
        *(partial(iter, text.documents) for text in built_in),
        *(partial(documents_of, file.path, file.url, text_field) for file in downloads),
        partial(documents_of_all, files, text_field),
    )
    if next(iter(documents), None) is None:
        raise TextError(f"{_name(words)}: {len(files) + len(downloads)} files, and all are empty")
    stated = [licence] if files or downloads else []
    return Text(
        name=_name(words),
        licence="; ".join([*(text.licence for text in built_in), *stated]),
        documents=documents,
        downloads=[file.record() for file in downloads],
    )


def _check_field(field: str, words: list[str], files: list[Path]) -> None:
    """Reject --text-field where the text does not come in records."""
    if field != "text" and not any(map(holds_records, files)):
        raise TextError(
            f"--text-field {field} goes with JSON lines (*.jsonl) and Parquet "
            f"(*.parquet); {_name(words)} has neither"
        )


def _built_in(word: str) -> Text:
    if word == BUILT_IN + "python":
        return python_text(Path(sysconfig.get_path("stdlib")))
    raise TextError(f"{word} is not built in; the only built-in text is {BUILT_IN}python")


def _files(name: str) -> list[Path]:
    """The files that a word names; of a run's data folder its shards alone."""
    if "://" in name:
        raise TextError(f"{name} is neither an http nor an https address, and no other is fetched")
    if (Path(name) / f"train{SHARD}").is_file():
        return sorted(Path(name).glob(f"*{SHARD}"))
    return named_files(name)


def _tokenised(words: list[str], files: list[Path], licence: str) -> Text:
    """Shards are trained on as they are, so nothing can be beside them that is to be tokenised."""
    others = [file for file in files if file.suffix != SHARD]
    others += [Path(word) for word in words if word.startswith(BUILT_IN) or is_address(word)]
    if others:
        raise TextError(
            f"{_name(words)}: shards (*{SHARD}) and text ({others[0]}) cannot be trained on "
            "together; tokenise all of the text in one run, or name shards alone"
        )
    return Text(name=_name(words), licence=licence, documents=(), shards=files)


def _name(words: list[str]) -> str:
    more = f" and {len(words) - 3} more" if len(words) > 3 else ""
    return ", ".join(words[:3]) + more
