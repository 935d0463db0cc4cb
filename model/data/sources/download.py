"""Download: a text at a URL, fetched once and cached.

A fetched file is kept in the cache folder ($XDG_CACHE_HOME or ~/.cache, then logitd/texts) under
the SHA-256 of its URL and is not fetched again; delete it to fetch it anew. It is written under a
temporary name and renamed once it is complete, so a partial download is never read. Covers a
single GET with redirects and a size limit. Does not log in or resume, and checks of the contents
only that they are UTF-8, gzip or Parquet.
"""

import codecs
import hashlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx

from logitd.model.data.sources.document import TextError
from logitd.model.data.sources.files import GZIP
from logitd.model.data.sources.progress import Downloaded, Downloading, Report
from logitd.model.files import file_aside

MB = 1_000_000

TIMEOUT = httpx.Timeout(30.0, connect=10.0)
"""Seconds without a byte, and to connect."""

REPORT_EVERY = 2.0
"""Seconds between two reports."""

BINARY = (GZIP, b"PAR1")
"""What begins so is checked when it is read; anything else has to be UTF-8."""


@dataclass(frozen=True)
class Download:
    """A text that lies in the cache."""

    url: str
    path: Path
    sha256: str
    size: int  # bytes

    def record(self) -> dict[str, Any]:
        """What a checkpoint says of it."""
        return {"url": self.url, "sha256": self.sha256, "bytes": self.size}


def is_address(name: str) -> bool:
    return name.lower().startswith(("http://", "https://"))


def download(url: str, *, max_mb: int, report: Report) -> Download:
    """The text at an address, from the cache or else from its server.

    Raises TextError in one sentence when it cannot be had or is larger than `max_mb` million
    bytes, and leaves nothing behind then.
    """
    address = _checked(url)
    path = _place(address)
    if path.is_file():
        cached = Download(url, path, _sha256(path), path.stat().st_size)
        report(Downloaded(url, cached.size, path, from_cache=True))
        return cached
    with _teaching(url), _aside(path) as file:
        sha256 = _fetch(address, file, max_mb * MB, report)
    fetched = Download(url, path, sha256, path.stat().st_size)
    report(Downloaded(url, fetched.size, path, from_cache=False))
    return fetched


def cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "logitd" / "texts"


def _checked(url: str) -> httpx.URL:
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise TextError(f"{url} is not an address: {error}") from error
    if not address.host:
        raise TextError(f"{url} is not an address: it does not name a server")
    if address.userinfo:
        raise TextError(
            f"the address of a text on {address.host} holds a user name or a password, which would "
            "stand in the checkpoint's card; fetch the file yourself and name it with --data"
        )
    return address


def _place(address: httpx.URL) -> Path:
    """Where a text is kept. The end of its name stays, because it tells the kind of file."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", address.path.rpartition("/")[2])[-60:]
    return cache_folder() / f"{hashlib.sha256(str(address).encode()).hexdigest()[:32]}-{name}"


def _fetch(address: httpx.URL, file: IO[bytes], limit: int, report: Report) -> str:
    """Write what the server sends; its sha256."""
    digest, check = hashlib.sha256(), _Utf8Check(str(address))
    headers = {"accept-encoding": "identity"}  # so that lengths are those of the file
    client = httpx.Client(follow_redirects=True, timeout=TIMEOUT, headers=headers)
    with client, client.stream("GET", address) as reply:
        if reply.status_code != 200:
            raise TextError(
                f"{reply.url} answers {reply.status_code} {reply.reason_phrase}, not with a text"
            )
        total = _length(reply)
        if total is not None and total > limit:
            raise _too_large(address, f"has {total:,} bytes", limit)
        done, told = 0, time.monotonic()
        for block in reply.iter_bytes():
            done += len(block)
            if done > limit:
                raise _too_large(address, f"goes on after {limit:,} bytes", limit)
            check.add(block)
            digest.update(block)
            file.write(block)
            if time.monotonic() - told >= REPORT_EVERY:
                report(Downloading(str(address), done, total))
                told = time.monotonic()
    check.end()
    if not done:
        raise TextError(f"{address} is empty")
    return digest.hexdigest()


def _length(reply: httpx.Response) -> int | None:
    """Bytes that are announced, if they are those of the file."""
    announced = reply.headers.get("content-length", "")
    plain = reply.headers.get("content-encoding", "identity") == "identity"
    return int(announced) if plain and announced.isdecimal() else None


def _too_large(address: httpx.URL, what: str, limit: int) -> TextError:
    return TextError(
        f"{address} {what}, more than the limit of {limit // MB:,} MB; raise it with "
        "--max-download-mb"
    )


class _Utf8Check:
    """Refuses what is neither UTF-8 nor a kind of file that is unpacked first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begin = b""
        self._decoder: codecs.IncrementalDecoder | None = None
        self._binary = False

    def add(self, block: bytes) -> None:
        if self._binary:
            return
        if self._decoder is None:
            self._begin += block
            if len(self._begin) < max(map(len, BINARY)):
                return
            self._decide()
        elif block:
            self._decode(block, final=False)

    def end(self) -> None:
        if self._decoder is None and not self._binary:
            self._decide()
        if not self._binary:
            self._decode(b"", final=True)

    def _decide(self) -> None:
        self._binary = self._begin.startswith(BINARY)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        if not self._binary:
            self._decode(self._begin, final=False)

    def _decode(self, block: bytes, *, final: bool) -> None:
        assert self._decoder is not None
        try:
            self._decoder.decode(block, final)
        except UnicodeDecodeError as error:
            raise TextError(
                f"{self._name} is not UTF-8 (byte 0x{error.object[error.start]:02x}: "
                f"{error.reason}): it is not text that can be trained on"
            ) from error


@contextmanager
def _aside(path: Path) -> Iterator[IO[bytes]]:
    """A file that gets its name when the block ends in peace, and is gone when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_aside(path) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


@contextmanager
def _teaching(url: str) -> Iterator[None]:
    """Turns what a network or a disk may raise into a sentence."""
    try:
        yield
    except httpx.TooManyRedirects as error:
        raise TextError(f"{url} redirects in circles, or more than 20 times") from error
    except httpx.UnsupportedProtocol as error:
        raise TextError(f"{url} redirects to an address that is neither http nor https") from error
    except httpx.ConnectTimeout as error:
        raise TextError(f"{url}: no connection within {TIMEOUT.connect:.0f} seconds") from error
    except httpx.TimeoutException as error:
        raise TextError(
            f"{url} sent nothing for {TIMEOUT.read:.0f} seconds; nothing was kept, try again"
        ) from error
    except httpx.ConnectError as error:
        raise TextError(
            f"{url}: no connection to its server ({error}); check the name and the network, or "
            "fetch the file elsewhere and name it with --data"
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise TextError(
            f"{url} broke off ({error or type(error).__name__}); nothing was kept, try again"
        ) from error
    except OSError as error:
        raise TextError(
            f"{url} cannot be kept in {cache_folder()}: {error.strerror or error}; XDG_CACHE_HOME "
            "names another place"
        ) from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
