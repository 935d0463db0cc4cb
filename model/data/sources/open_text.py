"""Opening: from the words of `--data` to a text.

  builtin:python         the text that this Python carries; what is read without any word
  builtin:stories        generated stories, 5 MB; builtin:stories:20mb for another size
  http://, https://      a file, fetched once
  *.tokens               shards that a run has tokenised, trained on as they are
  other words            files, folders and globs (`files.py`)

Several words give one text with the documents of all. Reads nothing but the beginning, and decides
nothing about training and validation (`split.py`).
"""

import re
import sysconfig
from functools import partial
from pathlib import Path

from model.data.sources.document import Documents, Text, TextError
from model.data.sources.download import download, is_address
from model.data.sources.files import (
    documents_of,
    documents_of_all,
    each_once,
    holds_records,
    named_files,
)
from model.data.sources.python_text import python_text
from model.data.sources.stories import stories_text
from model.training.config import TrainingConfig
from model.training.events import Reporter, silent

BUILT_IN = "builtin:"

SHARD = ".tokens"


def open_text(config: TrainingConfig, report: Reporter = silent) -> Text:
    """The text that a configuration names. Addresses are fetched now, files are read later."""
    words = list(dict.fromkeys(config.data)) or [BUILT_IN + "python"]
    built_in = [_built_in(word) for word in words if word.startswith(BUILT_IN)]
    if built_in and len(words) == 1:
        return built_in[0]
    addresses = [word for word in words if is_address(word)]
    names = [word for word in words if not word.startswith(BUILT_IN) and not is_address(word)]
    files = each_once(file for name in names for file in _files(name))
    if any(file.suffix == SHARD for file in files):
        return _ready_made(config, words, files)
    downloads = [download(url, max_mb=config.max_download_mb, report=report) for url in addresses]
    field = _field(config, [*files, *(each.path for each in downloads)])
    documents = Documents(
        *(partial(iter, each.documents) for each in built_in),
        *(partial(documents_of, each.path, each.url, field) for each in downloads),
        partial(documents_of_all, files, field),
    )
    if next(iter(documents), None) is None:
        raise TextError(f"{_name(words)}: {len(files) + len(downloads)} files, and all are empty")
    stated = [config.data_licence or "not stated"] if files or downloads else []
    return Text(
        name=_name(words),
        licence="; ".join([*(each.licence for each in built_in), *stated]),
        documents=documents,
        downloads=[each.record() for each in downloads],
    )


def _field(config: TrainingConfig, files: list[Path]) -> str:
    """The field that holds a record's text; refused where there are no records."""
    if config.text_field != "text" and not any(map(holds_records, files)):
        raise TextError(
            f"--text-field {config.text_field} goes with JSON lines (*.jsonl) and Parquet "
            f"(*.parquet); {_name(list(config.data))} has neither"
        )
    return config.text_field


def _built_in(word: str) -> Text:
    if word == BUILT_IN + "python":
        return python_text(Path(sysconfig.get_path("stdlib")))
    if size := re.fullmatch(r"builtin:stories(?::([1-9]\d{0,4})mb)?", word):
        return stories_text(int(size[1])) if size[1] else stories_text()
    raise TextError(
        f"{word} is not built in; there are builtin:python, builtin:stories and, with a size of "
        "up to 99999 MB, builtin:stories:20mb"
    )


def _files(name: str) -> list[Path]:
    """The files that a word names; of a run's data folder its shards alone."""
    if "://" in name:
        raise TextError(f"{name} is neither an http nor an https address, and no other is fetched")
    if (Path(name) / f"train{SHARD}").is_file():
        return sorted(Path(name).glob(f"*{SHARD}"))
    return named_files(name)


def _ready_made(config: TrainingConfig, words: list[str], files: list[Path]) -> Text:
    """Shards are trained on as they are, so nothing can be beside them that is to be tokenised."""
    others = [file for file in files if file.suffix != SHARD]
    others += [Path(word) for word in words if word.startswith(BUILT_IN) or is_address(word)]
    if others:
        raise TextError(
            f"{_name(words)}: shards (*{SHARD}) and text ({others[0]}) cannot be trained on "
            "together; tokenise all of the text in one run, or name shards alone"
        )
    return Text(
        name=_name(words), licence=config.data_licence or "not stated", documents=(), shards=files
    )


def _name(words: list[str]) -> str:
    more = f" and {len(words) - 3} more" if len(words) > 3 else ""
    return ", ".join(words[:3]) + more
