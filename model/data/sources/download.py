"""Download: a text at a web address, fetched once and cached.

A file in the cache folder ($XDG_CACHE_HOME or ~/.cache, then logitd/texts) is named by the SHA-256
of its URL; delete it to fetch it again. Files are renamed into the cache when they are complete.
Logins and resumed downloads are not supported.
"""

import hashlib
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx

from logitd.model.data.errors import DataError
from logitd.model.data.sources.files import BY_NAME
from logitd.model.files import whole_file

MB = 1_000_000
TIMEOUT = httpx.Timeout(30.0, connect=10.0)
"""Time limits in seconds: 30 to wait for more data, 10 to connect."""
GZIP_ENCODINGS = ("gzip", "x-gzip")
REPORT_EVERY = 2.0
"""Seconds between two progress reports."""
TABLES = {
    "text/csv": ".csv",
    "text/tab-separated-values": ".tsv",
    "application/vnd.apache.parquet": ".parquet",
}
"""Suffixes of tables, by media type."""


@dataclass(frozen=True)
class Downloading:
    """Event: the progress of a download, every few seconds."""

    url: str
    done: int  # bytes
    total: int | None  # bytes, if the server announced them


@dataclass(frozen=True)
class Downloaded:
    """Event, and the result of `download`: the text is in the cache. It was fetched in this call
    or, if `from_cache`, in an earlier one."""

    url: str
    size: int  # bytes
    path: Path
    from_cache: bool
    sha256: str

    def record(self) -> dict[str, Any]:
        return {"url": self.url, "sha256": self.sha256, "bytes": self.size}


Report = Callable[[Downloading | Downloaded], None]


def is_address(name: str) -> bool:
    return name.lower().startswith(("http://", "https://"))


def download(url: str, *, max_mb: int, report: Report) -> Downloaded:
    """Get the text at an address from the cache or from its server. Raises DataError if it cannot
    be fetched or is larger than `max_mb` million bytes."""
    address = _checked(url)
    name = re.sub(r"[^A-Za-z0-9._-]", "_", address.path.rpartition("/")[2])
    key = hashlib.sha256(str(address).encode()).hexdigest()[:32]
    path = cache_folder() / f"{key}-{name[-60:]}"  # ends with the file's suffix
    if not (cached := path.is_file()):
        _fetch(address, path, max_mb * MB, report)
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    downloaded = Downloaded(url, path.stat().st_size, path, cached, sha256)
    report(downloaded)
    return downloaded


def cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "logitd" / "texts"


def _checked(url: str) -> httpx.URL:
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise DataError(f"{url} is not an address: {error}") from error
    if not address.host:
        raise DataError(f"{url} is not an address: it does not name a server")
    if address.userinfo:
        raise DataError(
            f"the address of a text on {address.host} contains a user name or a password, which "
            "the checkpoint's card would show: download the file and name it with --data"
        )
    return address


def _check_type(address: httpx.URL, reply: httpx.Response) -> None:
    """Raise DataError if redirects, or the header of a file without a suffix, show a type of file
    that the address does not name."""
    named, found = (_type(url.path) for url in (address, reply.url))
    way_out = "download the file and name it with --data"
    if found:
        way_out = f"name that address, or {way_out}"
    elif not Path(reply.url.path).suffix:
        media_type = reply.headers.get("content-type", "").partition(";")[0].strip().lower()
        found = TABLES.get(media_type, "")
    if found and found != named:
        raise DataError(
            f"{address} leads to {reply.url}, a file of type {found}, which the name does not "
            f"show: {way_out}"
        )


def _type(name: str) -> str:
    suffix = Path(name.lower().removesuffix(".gz")).suffix
    return suffix if suffix in BY_NAME or suffix == ".json" else ""


def _fetch(address: httpx.URL, path: Path, limit: int, report: Report) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            _stream(address, file, limit, report)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DataError(
            f"{address} cannot be downloaded ({type(error).__name__}: {error}): try again, or "
            "download the file and name it with --data"
        ) from error
    except OSError as error:
        raise DataError(
            f"{address} cannot be stored in {cache_folder()} ({error.strerror or error}): set "
            "XDG_CACHE_HOME to another folder"
        ) from error


def _stream(address: httpx.URL, file: IO[bytes], limit: int, report: Report) -> None:
    headers = {"accept-encoding": "identity"}  # so that content-length is the file's length
    client = httpx.Client(follow_redirects=True, timeout=TIMEOUT, headers=headers)
    with client, client.stream("GET", address) as reply:
        if reply.status_code != 200:
            raise DataError(f"{reply.url} answered {reply.status_code} {reply.reason_phrase}")
        _check_type(address, reply)
        length = reply.headers.get("content-length", "")
        encoding = reply.headers.get("content-encoding", "identity").lower()
        if encoding not in ("identity", *GZIP_ENCODINGS):
            raise DataError(
                f"{reply.url} answered with the content-encoding {encoding}, but only gzip is "
                "supported: download the file and name it with --data"
            )
        packed = encoding in GZIP_ENCODINGS
        total = int(length) if length.isdecimal() and not packed else None
        done, reported = 0, time.monotonic()
        for block in _unpacked(reply) if packed else reply.iter_raw():
            done += len(block)
            if max(done, total or 0) > limit:
                raise DataError(
                    f"{address} has {f'{total:,}' if total else f'more than {limit:,}'} bytes, "
                    f"above the limit of {limit // MB:,} MB: raise it with --max-download-mb"
                )
            file.write(block)
            if time.monotonic() - reported >= REPORT_EVERY:
                report(Downloading(str(address), done, total))
                reported = time.monotonic()


def _unpacked(reply: httpx.Response) -> Iterator[bytes]:
    """The body of a reply with gzip encoding. Raises DataError if it is damaged or incomplete;
    httpx accepts an incomplete one."""
    member = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        for block in reply.iter_raw():
            while block:
                if member.eof:  # a body may have several members
                    member = zlib.decompressobj(zlib.MAX_WBITS | 16)
                yield member.decompress(block)
                block = member.unused_data
    except zlib.error as error:
        raise DataError(f"{reply.url} answered with a damaged gzip encoding: {error}") from error
    if not member.eof:
        raise DataError(f"{reply.url} answered with an incomplete gzip encoding: try again")
