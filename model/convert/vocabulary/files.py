"""Vocabulary files: reads JSON, plain pickles, lists of lines, ranks and tokenizer.json.

`vocabulary_in` reads one file. `vocabularies_beside` searches the model's folder and its usual
subfolders, or else the parent folder and its usual subfolders. Files in other formats are skipped.
Code in a file is never run.
"""

import base64
import contextlib
import hashlib
import re
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from logitd.model.checkpoint.checkpoint import CONFIG
from logitd.model.convert.foreign import ConvertError, ForeignTokenizer, naming
from logitd.model.convert.hf.chat_template import read_template
from logitd.model.convert.hf.special_tokens import TOKENIZER_CONFIG
from logitd.model.convert.hf.tokenizer import TOKENIZER, read_tokenizer
from logitd.model.convert.pt_file import read_plain_pickle
from logitd.model.convert.source_file import (
    object_beside,
    source_bytes,
    source_json,
    source_text,
)
from logitd.model.convert.vocabulary.build import build_tokenizer
from logitd.model.convert.vocabulary.lines import table_of_lines
from logitd.model.convert.vocabulary.llama2c import llama2c_tokenizer
from logitd.model.convert.vocabulary.table import Table, read_merges, table_of
from logitd.model.convert.vocabulary.words import WHOLE_TEXT
from logitd.model.files import VOCABULARY_BYTES
from logitd.model.text.published import KNOWN_FILES, WITH_MORE, published_tokenizer
from logitd.model.text.tokenizer import Tokenizer, parse_ranks

NAMES = (
    *("meta.pkl", "meta.json", "*vocab*", "*tokenizer*", "*mapping*", "*stoi*", "*itos*"),
    *("*char*to*", "*char*2*", "*token*to*", "*token*2*", "*word*to*", "*word*2*", "chars.*"),
    *("characters.*", "alphabet.*", "encoder.json", "*id*to*", "*id*2*", "*int*to*", "*i*2*c*"),
)
"""Patterns for the names of vocabulary files. Names are compared in lower case."""
PICKLES = (".pkl", ".pickle", ".p")
SUFFIXES = (*PICKLES, ".json", ".txt", ".model", ".tiktoken", ".bin")
FOLDERS = (
    *("vocab", "vocabs", "vocabulary", "tokenizer", "tokenizers", "data", "dataset", "datasets"),
    *("meta", "assets", "artifacts", "input", "inputs", "text", "texts", "corpus", "raw"),
)
"""Names of folders near a model that may contain vocabularies and texts. In folders whose name
begins with "data", the subfolders are searched, too."""
MERGES = ("merges.txt", "merges.json", "bpe_merges.txt", "bpe_merges.json")
MOST_FOLDERS = 200


def vocabulary_in(path: Path, *, skip_normalizer: bool) -> ForeignTokenizer | None:
    """Read the vocabulary in a file; None if the file contains something else. Raises ConvertError
    if the vocabulary is damaged or not supported."""
    suffix = path.suffix.lower()
    if suffix in PICKLES:
        return _built(table_of(read_plain_pickle(path), str(path)), path, skip_normalizer)
    if suffix == ".json":
        document = source_json(path)
        if _is_library_document(document):
            vocabulary = read_tokenizer(path, skip_normalizer=skip_normalizer)
            return read_template(vocabulary, path.parent)
        return _built(table_of(document, str(path)), path, skip_normalizer)
    raw = source_bytes(path)
    if suffix == ".model" and not _are_ranks(raw):  # Llama 3's tokenizer.model has ranks
        return _lecture_model(raw, path)
    if suffix == ".bin":
        return llama2c_tokenizer(raw, str(path))
    if _are_ranks(raw):
        return _of_ranks(raw, path)
    return _built(table_of_lines(raw, path), path, skip_normalizer)


def vocabularies_beside(
    folder: Path, dataset: str | None, *, skip_normalizer: bool
) -> tuple[list[ForeignTokenizer], list[str]]:
    """Find the vocabularies in the nearest folders that have any. Also returns a sentence about
    each file that was read but is not a usable vocabulary.

    `dataset` is the name of nanoGPT's data folder, if it is known. Raises ConvertError if a
    `tokenizer.json`, or a vocabulary with merges, is damaged or not supported. Any other file might
    not be a vocabulary at all, so its error is only returned as a sentence.
    """
    in_vain: list[str] = []
    for places in _places(folder, dataset):
        candidates = []
        for place in places:
            for path in _files(place):
                try:
                    vocabulary = vocabulary_in(path, skip_normalizer=skip_normalizer)
                except ConvertError as error:
                    if path.name == TOKENIZER or _merges_beside(path) is not None:
                        raise  # this is certainly the vocabulary
                    in_vain.append(str(error))
                    continue
                if vocabulary is not None:
                    candidates.append(replace(vocabulary, where=str(path)))
                    candidates += _sorted_characters(path)
                elif path.name != TOKENIZER_CONFIG:
                    in_vain.append(f"{path} is not a vocabulary in a known form")
        if candidates:
            return candidates, in_vain
    return [], in_vain


def files_beside(folder: Path) -> Iterator[Path]:
    """The files that a search for a vocabulary may read, in all folders that it searches."""
    for place in (place for places in _places(folder, None) for place in places):
        yield from _files(place)
        yield from (place / name for name in MERGES if (place / name).is_file())


def _sorted_characters(path: Path) -> Iterator[ForeignTokenizer]:
    """Yield a second interpretation of a file that has one character per line. Some programs use
    the sorted characters of the whole file, including the line break, as the vocabulary."""
    if path.suffix.lower() != ".txt":
        return
    text = source_text(path).removeprefix("\ufeff")
    if all(len(line) <= 1 for line in text.split("\n")):
        texts = dict(enumerate(sorted(set(text))))
        yield build_tokenizer(Table(texts=texts, where=f"characters:{path}", listed=True))


def text_of_characters(folder: Path, count: int) -> Path | None:
    """The only text file near a model that has exactly `count` different characters; None if there
    is no such file or more than one."""
    above, texts = folder.resolve().parent, list[Path]()
    for place in (folder, *_subfolders(folder), above, *_subfolders(above)):
        for path in _listed(place):
            small = path.suffix.lower() == ".txt" and _is_small(path)
            if small and count_characters(path) == count:
                texts.append(path)
    return texts[0] if len(texts) == 1 else None


def count_characters(text: Path) -> int | None:
    """The number of different characters in a text file; None if the file is too large or
    unreadable."""
    try:
        return len(set(source_text(text)))
    except ConvertError:
        return None


def _places(folder: Path, dataset: str | None) -> Iterator[list[Path]]:
    above = folder.resolve().parent
    yield [folder]
    if dataset and (named := above / "data" / dataset).is_dir():
        yield [named]
    yield list(_subfolders(folder))
    yield [above, *_subfolders(above)]
    yield [above.parent / "tokenizer"]  # nanochat has one for all its folders of checkpoints


def _subfolders(folder: Path) -> Iterator[Path]:
    for inner in _listed(folder):
        if inner.name.lower() in FOLDERS and inner.is_dir():
            yield inner
            if inner.name.lower().startswith("data"):
                yield from [deeper for deeper in _listed(inner) if deeper.is_dir()][:MOST_FOLDERS]


def _files(folder: Path) -> Iterator[Path]:
    whole = False  # skip older files of the same vocabulary
    with contextlib.suppress(ConvertError):
        whole = _is_library_document(source_json(folder / TOKENIZER))
    for path in _listed(folder):
        named = any(fnmatch(path.name.lower(), name) for name in NAMES)
        older = whole and path.name != TOKENIZER and _merges_beside(path) is not None
        if path.suffix.lower() in SUFFIXES and named and not older and _is_small(path):
            yield path


def _is_small(path: Path) -> bool:
    return path.is_file() and path.stat().st_size <= VOCABULARY_BYTES


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # the user may not be allowed to read the parent folder
        return []


def _is_library_document(document: Any) -> bool:
    return isinstance(document, dict) and isinstance(document.get("model"), dict)


def _built(table: Table | None, path: Path, skip_normalizer: bool) -> ForeignTokenizer | None:
    if table is None:
        return None
    beside = _merges_beside(path)
    if beside is not None and table.merges is None and table.strings is None:
        pairs, strings = read_merges(_merges(beside), str(beside))
        table = replace(table, merges=pairs, strings=strings)
        vocabulary = build_tokenizer(table, skip_normalizer=skip_normalizer)
        return read_template(vocabulary, path.parent)
    return build_tokenizer(table, skip_normalizer=skip_normalizer)


def _merges_beside(path: Path) -> Path | None:
    if "vocab" not in path.name.lower() and path.name.lower() != "encoder.json":
        return None
    return next((path.with_name(name) for name in MERGES if path.with_name(name).is_file()), None)


def _merges(path: Path) -> Any:
    if path.suffix == ".json":
        return source_json(path)
    lines = source_bytes(path).decode("utf-8", errors="replace").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#version")]


def _lecture_model(raw: bytes, path: Path) -> ForeignTokenizer:
    if re.match(rb"minbpe v1\r?\n", raw) is None:
        raise ConvertError(
            f"{path} is in the format of SentencePiece or another library, which is not supported"
        )
    try:
        lines = raw.decode("utf-8").replace("\r\n", "\n").split("\n")
        count = int(lines[2])
        special = [line.rsplit(" ", 1) for line in lines[3 : 3 + count]]
        names = {int(number): name for name, number in special}
        pairs = [tuple(map(int, line.split())) for line in lines[3 + count :] if line.strip()]
        merges = {(left, right): 256 + place for place, (left, right) in enumerate(pairs)}
    except (ValueError, IndexError) as error:
        raise ConvertError(f"{path} is damaged: {error}") from error
    return build_tokenizer(
        Table(
            texts=names,
            where=str(path),
            merges=merges,
            pattern=lines[1] or WHOLE_TEXT,
            special=frozenset(names.values()),
        )
    )


def _of_ranks(raw: bytes, path: Path) -> ForeignTokenizer:
    """The vocabulary in a ranks file, which states neither the split pattern nor special tokens.
    Both are known for a published file, and stated next to the file in a checkpoint of logitd.
    For any other file, the tokens show the pattern, and special tokens stay unknown."""
    sha256 = hashlib.sha256(raw).hexdigest()
    with naming(path):
        if sha256 in KNOWN_FILES:
            tokenizer = published_tokenizer(str(path))
            more = WITH_MORE.get(tokenizer.vocab_size)
            note = f"--tokenizer {more} has the same ranks, and more special tokens"
            return ForeignTokenizer(tokenizer=tokenizer, notes=(note,) if more else ())
        ranks = parse_ranks(raw, path.name)
        checkpoint = object_beside(path.parent, CONFIG)
        hashes = checkpoint.get("files")
        if isinstance(hashes, dict) and hashes.get(path.name) == sha256:
            return ForeignTokenizer(tokenizer=Tokenizer.described(checkpoint["tokenizer"], ranks))
    texts = {rank: token for token, rank in ranks.items()}
    if twice := next((token for token, rank in ranks.items() if texts[rank] != token), None):
        raise ConvertError(f"{path}: {twice!r} and {texts[ranks[twice]]!r} have the same rank")
    read = build_tokenizer(Table(texts=texts, where=str(path), ranked=True))
    note = (
        "a ranks file states no special tokens; if the model has some, give a pickled "
        "tiktoken.Encoding"
    )
    return replace(read, notes=(*read.notes, note))


def _are_ranks(raw: bytes) -> bool:
    """True if each line has a token in base64 and its rank, and every single byte is a token."""
    lines = [line.split() for line in raw.splitlines() if line.strip()]
    if not all(len(parts) == 2 and parts[1].isdigit() for parts in lines):
        return False
    try:
        tokens = {base64.b64decode(token, validate=True) for token, _ in lines}
    except ValueError:
        return False
    return all(bytes([byte]) in tokens for byte in range(256))
