"""A dataset on the Hugging Face Hub as corpus files that are read over the network, in ranges, without a download.

In: an entry ``hf://datasets/owner/name[@revision][/path or glob]``. The revision is settled to a commit once, so that
all processes read the same bytes; the data files below the path are listed with their sizes and content ids. A file
is then read by HTTP range requests, by the same reader as a local one. An access token is taken from the environment
(HF_TOKEN) or from ``hf auth login``, HF_ENDPOINT and HF_HUB_OFFLINE are heeded. huggingface_hub is imported only where
an entry names a dataset. Source: https://huggingface.co/docs/hub/api and huggingface_hub 2.4.
"""

from __future__ import annotations

import errno
import io
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import quote, unquote, urlsplit

from zerokara.errors import Fault, RunError, redacted

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

PREFIX = "hf://datasets/"
_ENTRY = re.compile(
    r"hf://datasets/(?P<dataset>[\w.-]+/[\w.-]+?)(?:@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(?P<path>.*))?"
)
NO_DATA = frozenset(
    {
        *("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json", "croissant.json"),
        *("readme.txt", "license.txt", "requirements.txt"),
    }
)
"""Files that tell of a dataset and are none of its data; still read where an entry names one."""
TIMEOUT_SECONDS = 10.0
"""To connect, and for each piece of an answer."""
RETRY_WAITS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each new attempt, once the reading is under way; a list or a revision is asked for only once."""
MAX_ASKED_WAIT = 300.0
"""Seconds; the Hub counts requests over five minutes."""
_MAX_READ_AHEAD = 8 * 1024 * 1024
_PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_MAGIC = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class HubFile:
    """One file of a dataset, at one commit."""

    dataset: str
    commit: str
    path: str
    bytes: int
    content: str
    """What identifies the content: the SHA-256 of a file outside git, else ``git:`` and the blob id."""

    @property
    def name(self) -> str:
        """The file as an entry may name it."""
        return f"{PREFIX}{self.dataset}@{self.commit}/{self.path}"

    def __str__(self) -> str:
        return self.name


def find(entry: str, where: str, faults: list[Fault], is_data: Callable[[str], bool], formats: str) -> list[HubFile]:
    """The data files that an entry names, sorted by path; `is_data` tells a data file by its name.

    What is wrong with the entry is added to `faults`.

    Raises:
        RunError: the Hub cannot be reached, or answers with an error of its own.
    """
    from huggingface_hub import errors

    match = _ENTRY.fullmatch(entry)
    if match is None:
        rule = "is not the name of a Hub dataset"
        remedy = f"write {PREFIX}owner/name, or {PREFIX}owner/name@revision/path"
        faults.append(Fault(where=where, value=entry, rule=rule, remedy=remedy))
        return []
    dataset, revision = match["dataset"], unquote(match["revision"] or "main")
    path = (match["path"] or "").strip("/")
    try:
        commit = _get_json(f"api/datasets/{dataset}/revision/{quote(revision, safe='')}")[0]["sha"]
        files = [file for file in _files(dataset, commit, path) if is_data(file.path.rpartition("/")[2])]
        if files:
            _try_access(files)
            return files
        rule, remedy = f"names no data file of the dataset; looked for {formats}", _what_is_there(dataset, commit)
    except errors.GatedRepoError:
        rule = f"the dataset {dataset} is gated: its owner lets in only who agreed to the terms"
        remedy = f"agree on {_endpoint()}/datasets/{dataset}, then set HF_TOKEN or run: hf auth login"
    except errors.RevisionNotFoundError:
        rule, remedy = f"the dataset {dataset} has no revision {revision!r}", "name a branch, a tag or a commit"
    except errors.RepositoryNotFoundError:
        rule = f"there is no dataset {dataset} at {_endpoint()} that you may see"
        remedy = "check the name; for a private one set HF_TOKEN or run: hf auth login"
    except Exception as error:  # Whatever a network, a proxy or the library may come up with; worded, never swallowed.
        raise RunError(f"{where}: {entry}: {_worded(error)}") from error
    faults.append(Fault(where=where, value=entry, rule=rule, remedy=remedy))
    return []


def open_file(file: HubFile, buffer_bytes: int) -> BinaryIO:
    """The bytes of a file as a seekable stream; with `buffer_bytes` 0 nothing is read that was not asked for.

    Raises:
        OSError: from reading, when the network fails for longer than the retries last; names the file.
    """
    if buffer_bytes:
        return io.BufferedReader(_HubReader(file, _MAX_READ_AHEAD), buffer_bytes)
    return _HubReader(file, 0)  # type: ignore[return-value]  # a RawIOBase has what is used of it


class _HubReader(io.RawIOBase):
    """A file on the Hub; who reads on from where the last read ended is read ahead for, each time further."""

    def __init__(self, file: HubFile, max_read_ahead: int):
        self.name = file.name
        self._file, self._position = file, 0
        self._block, self._block_start = b"", 0
        self._max_read_ahead, self._read_ahead = max_read_ahead, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.bytes}[whence]
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        place = self._position - self._block_start
        if not 0 <= place < len(self._block):
            goes_on = place == len(self._block)
            self._read_ahead = min(max(2 * self._read_ahead, len(view)), self._max_read_ahead) if goes_on else 0
            end = min(self._position + max(len(view), self._read_ahead), self._file.bytes)
            self._block = b""  # let go of before the next one comes
            self._block = _read_range(self._file, self._position, end) if self._position < end else b""
            self._block_start, place = self._position, 0
        count = min(len(view), len(self._block) - place)
        view[:count] = memoryview(self._block)[place : place + count]
        self._position += count
        return count


def _read_range(file: HubFile, start: int, end: int) -> bytes:
    """The bytes from `start` to before `end`, tried several times."""
    for wait in (*RETRY_WAITS, None):
        try:
            return _request_range(file, start, end)
        except Exception as error:  # Sorted below: what may pass is tried again, anything else is told.
            if wait is None or not _may_pass(error):
                message = redacted(f"reading bytes {start:,} to {end:,} of {file.bytes:,} failed: {_worded(error)}")
                raise OSError(errno.EIO, message, file.name) from error
            time.sleep(max(wait, _asked_wait(error)))
    raise AssertionError("unreachable")


def _request_range(file: HubFile, start: int, end: int) -> bytes:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    url = hf_hub_url(file.dataset, file.path, repo_type="dataset", revision=file.commit, endpoint=_endpoint())
    headers = {**build_hf_headers(), "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_SECONDS) as response:
        if response.status_code >= 400:
            response.read()
        hf_raise_for_status(response)
        if response.status_code != 206 and (start, end) != (0, file.bytes):
            raise _NoRanges(f"the server answers a request for a part of a file with status {response.status_code}")
        content: bytes = response.read()
    if len(content) != end - start:
        raise ConnectionResetError(errno.ECONNRESET, f"{len(content):,} of {end - start:,} bytes came")
    return content


class _NoRanges(Exception):
    """The server does not serve parts of files."""


def _may_pass(error: Exception) -> bool:
    """Whether another attempt may succeed."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in _PASSING_STATUS
    return isinstance(error, httpx2.TransportError | OSError) and not isinstance(error, OfflineModeIsEnabled)


def _asked_wait(error: Exception) -> float:
    """Seconds after which the server wants to be asked again (when it is asked too often), within reason."""
    from huggingface_hub.errors import HfHubHTTPError

    asked = error.response.headers.get("Retry-After", "") if isinstance(error, HfHubHTTPError) else ""
    return min(float(asked), MAX_ASKED_WAIT) if asked.isdecimal() else 0.0


def _worded(error: Exception) -> str:
    """What went wrong, for people."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, and a Hub dataset is read over the network; unset it, or name local files"
    if isinstance(error, HfHubHTTPError):
        told = error.server_message or str(error).strip().splitlines()[0]
        hint = "; check HF_TOKEN, or run: hf auth login" if error.response.status_code in (401, 403) else ""
        return f"the Hub answered with status {error.response.status_code}: {told}{hint}"
    if isinstance(error, httpx2.TransportError | OSError):
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return f"the Hub at {_endpoint()} cannot be reached ({what}); is there a network here? Else name local files"
    return f"{_endpoint()} did not answer as a Hub does ({type(error).__name__}: {error})"


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def _get_json(path: str, **parameters: str) -> tuple[Any, str]:
    """The answer to one question, and the address of its next page or an empty string."""
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    url = path if "://" in path else f"{_endpoint()}/{path}"
    # The address of a next page comes from the server: the token goes to nobody but the Hub.
    headers = build_hf_headers(token=None if _server(url) == _server(_endpoint()) else False)
    answer = get_session().get(url, params=parameters or None, headers=headers, timeout=TIMEOUT_SECONDS)
    hf_raise_for_status(answer)
    return answer.json(), answer.links.get("next", {}).get("url", "")


def _server(address: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(address)
    return parts.scheme, parts.hostname, parts.port


def _files(dataset: str, commit: str, path: str) -> list[HubFile]:
    """The files that a path names: a file, the files below a folder, or those that match a glob."""
    from huggingface_hub.errors import RemoteEntryNotFoundError

    try:
        if _MAGIC.search(path):
            folder = path[: _MAGIC.search(path).start()].rpartition("/")[0]  # type: ignore[union-attr]
            pattern = _pattern(path)
            found = [file for file in _tree(dataset, commit, folder, True) if pattern.fullmatch(file.path)]
        else:
            found = list(_tree(dataset, commit, path, True))
    except RemoteEntryNotFoundError:
        found = []
    if not found and path and not _MAGIC.search(path):
        try:
            siblings = _tree(dataset, commit, path.rpartition("/")[0], False)
            return [file for file in siblings if file.path == path]
        except RemoteEntryNotFoundError:
            return []
    return sorted((file for file in found if _looks_like_data(file.path)), key=lambda file: file.path)


def _looks_like_data(path: str) -> bool:
    parts = path.lower().split("/")
    return parts[-1] not in NO_DATA and not any(part.startswith(".") for part in parts)


def _tree(dataset: str, commit: str, folder: str, recursive: bool) -> Iterator[HubFile]:
    inside = f"/{quote(folder, safe='')}" if folder else ""
    page, following = _get_json(
        f"api/datasets/{dataset}/tree/{commit}{inside}", recursive=str(recursive).lower(), expand="false"
    )
    while True:
        for item in page:
            if item["type"] == "file":
                outside_git = item.get("lfs")
                content = outside_git["oid"] if outside_git else f"git:{item['oid']}"
                size = outside_git["size"] if outside_git else item["size"]
                yield HubFile(dataset, commit, item["path"], size, content)
        if not following:
            return
        page, following = _get_json(following)


def _pattern(glob: str) -> re.Pattern[str]:
    """A glob as a regular expression: ``*`` and ``?`` stay within a folder, ``**/`` goes through any number."""
    spelt = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.findall(r"\*\*/|\*\*|\*|\?|\[!?[^\]]+\]|.", glob)
    translated = [
        spelt.get(part) or (part.replace("[!", "[^", 1) if len(part) > 1 else re.escape(part)) for part in parts
    ]
    return re.compile("".join(translated))


def _try_access(files: list[HubFile]) -> None:
    """Read a byte: a gated dataset lists its files to everyone."""
    first = next((file for file in files if file.bytes), None)
    if first:
        _request_range(first, 0, 1)


def _what_is_there(dataset: str, commit: str) -> str:
    names = sorted(file.path for file in islice(_tree(dataset, commit, "", True), 1000))
    more = f" and {len(names) - 8} more" if names[8:] else ""
    converted = f"{PREFIX}{dataset}@refs/convert/parquet"
    held = f"it holds {', '.join(names[:8])}{more}" if names else "it is empty"
    return f"{held}; the Hub's own conversion, where it made one, is {converted}"
