"""A dataset on the Hugging Face Hub as corpus files that are read over the network, in ranges, without a download.

In: an entry ``hf://datasets/owner/name[@revision][/path or glob]``. Its revision is resolved to a commit once, so that
all processes read the same bytes; the data files below the path are listed with their sizes and content ids. Listing,
globbing, buffering, retries and access tokens are `huggingface_hub.HfFileSystem`'s (HF_TOKEN or ``hf auth login``;
HF_ENDPOINT and HF_HUB_OFFLINE apply). Ours is what it does not do: `_HubStream` checks that an answer is the range that
was asked for, and names the file in every error; `_client` keeps the token from hosts that are not the Hub.
Import this module only where an entry names a dataset. Source: huggingface_hub 2.4.
"""

from __future__ import annotations

import errno
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

import httpx2
from huggingface_hub import HfApi, HfFileSystem, HfFileSystemFile, constants, errors, set_client_factory
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff, logging
from huggingface_hub.utils._http import default_client_factory  # in no public module, though `set_client_factory` is

from zerokara.errors import Fault, RunError, redacted

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
"""Files that describe a dataset and are none of its data; still read where an entry names one."""
TIMEOUT_SECONDS = 10.0
"""To connect, and for each part of an answer."""
FIRST_WAIT_SECONDS = 1.0
"""Before the second of six attempts to read; each further wait is twice as long, up to 8 s. Only `find` does not wait:
whether there is a network at all is told at once."""
_READ_AHEAD_BUFFERS = 4
"""How many buffers one request fetches."""
_GLOB_CHARACTERS = re.compile(r"[*?\[]")


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


def find(entry: str, where: str, faults: list[Fault], is_data: Callable[[str], bool], formats: str) -> list[HubFile]:
    """List the data files that an entry names, sorted by path; `is_data` recognizes a data file by its name.

    What is wrong with the entry is added to `faults`.

    Raises:
        RunError: the Hub cannot be reached, or answers with an error of its own.
    """
    match = _ENTRY.fullmatch(entry)
    if match is None:
        rule = "is not the name of a Hub dataset"
        remedy = f"write {PREFIX}owner/name, or {PREFIX}owner/name@revision/path"
        faults.append(Fault(where=where, value=entry, rule=rule, remedy=remedy))
        return []
    dataset, revision = match["dataset"], unquote(match["revision"] or "main")
    try:
        commit = HfApi().dataset_info(dataset, revision=revision, timeout=TIMEOUT_SECONDS).sha
        found = _list(dataset, str(commit), (match["path"] or "").strip("/"))
        files = [file for file in found if is_data(file.path.rpartition("/")[2])]
        if files:
            # A gated dataset lists its files to everyone.
            _fetch(next((file for file in files if file.bytes), files[0]), 0, 1, max_retries=0)
            return files
        rule, remedy = f"names no data file of the dataset; looked for {formats}", _contents(dataset, str(commit))
    except errors.GatedRepoError:
        rule = f"the dataset {dataset} is gated: its owner lets in only who agreed to the terms"
        remedy = f"agree on {constants.ENDPOINT}/datasets/{dataset}, then set HF_TOKEN or run: hf auth login"
    except errors.RevisionNotFoundError:
        rule, remedy = f"the dataset {dataset} has no revision {revision!r}", "name a branch, a tag or a commit"
    except errors.RepositoryNotFoundError:
        rule = f"there is no dataset {dataset} at {constants.ENDPOINT} that you may see"
        remedy = "check the name; for a private one set HF_TOKEN or run: hf auth login"
    except Exception as error:  # Whatever a network, a proxy or the library may raise; worded, never swallowed.
        raise RunError(f"{where}: {entry}: {_message(error)}") from error
    faults.append(Fault(where=where, value=entry, rule=rule, remedy=remedy))
    return []


def open_file(file: HubFile, buffer_bytes: int) -> BinaryIO:
    """Open a file as a seekable stream; with `buffer_bytes` 0 it fetches only what it is asked for.

    Raises:
        OSError: the network fails for longer than the retries last (from reading too); names the file.
    """
    stream = _HubStream(file, buffer_bytes)
    return io.BufferedReader(stream, buffer_bytes) if buffer_bytes else stream


class _HubStream(HfFileSystemFile):
    """A file on the Hub."""

    def __init__(self, file: HubFile, buffer_bytes: int):
        self._file = file
        cache: dict[str, Any] = {"cache_type": "none"}
        if buffer_bytes:
            cache = {"cache_type": "readahead", "block_size": _READ_AHEAD_BUFFERS * buffer_bytes}
        try:
            super().__init__(HfFileSystem(), file.name, size=file.bytes, **cache)
        except Exception as error:
            raise _failed(file, "opening", error) from error

    def _fetch_range(self, start: int, end: int) -> bytes:
        try:
            return _fetch(self._file, start, end)
        except Exception as error:
            raise _failed(self._file, f"reading bytes {start:,} to {end:,}", error) from error


def _failed(file: HubFile, action: str, error: Exception) -> OSError:
    return OSError(errno.EIO, redacted(f"{action} of {file.bytes:,} failed: {_message(error)}"), file.name)


def _fetch(file: HubFile, start: int, end: int, max_retries: int = 5) -> bytes:
    """The bytes from `start` to before `end`."""
    url = HfFileSystem().url(file.name)
    headers = {**build_hf_headers(), "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    waits: dict[str, Any] = {"max_retries": max_retries, "base_wait_time": FIRST_WAIT_SECONDS}
    answer = http_backoff("GET", url, headers=headers, timeout=TIMEOUT_SECONDS, **waits)
    hf_raise_for_status(answer)
    content: bytes = answer.content
    if len(content) != min(end, file.bytes) - start:
        # A server that ignores the header sends the whole file.
        raise RuntimeError(f"the server answers a request for a part of a file with status {answer.status_code}")
    return content


def _list(dataset: str, commit: str, path: str) -> list[HubFile]:
    """The files that a path names: a file, the files below a folder, or those that match a glob."""
    files, root = HfFileSystem(), f"datasets/{dataset}@{commit}/"
    list_files: Any = files.glob if _GLOB_CHARACTERS.search(path) else files.find
    found = []
    for name, facts in list_files(root + path, detail=True).items():
        inner = name.removeprefix(root)
        if facts["type"] == "file" and (inner == path or _looks_like_data(inner)):
            content = facts["lfs"]["sha256"] if facts["lfs"] else f"git:{facts['blob_id']}"
            found.append(HubFile(dataset, commit, inner, facts["size"], content))
    return sorted(found, key=lambda file: file.path)


def _looks_like_data(path: str) -> bool:
    parts = path.lower().split("/")
    return parts[-1] not in NO_DATA and not any(part.startswith(".") for part in parts)


def _contents(dataset: str, commit: str) -> str:
    """What the dataset holds, as a hint for a mistyped path."""
    root = f"datasets/{dataset}@{commit}/"
    names = [name.removeprefix(root) for name in HfFileSystem().find(root)]
    more = f" and {len(names) - 8} more" if names[8:] else ""
    held = f"it holds {', '.join(names[:8])}{more}" if names else "it is empty"
    return f"{held}; the Hub's own conversion, where it made one, is {PREFIX}{dataset}@refs/convert/parquet"


def _message(error: BaseException) -> str:
    """What went wrong, for people."""
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, and a Hub dataset is read over the network; unset it, or name local files"
    if isinstance(error, errors.HfHubHTTPError):
        message = error.server_message or str(error).strip().splitlines()[0]
        hint = "; check HF_TOKEN, or run: hf auth login" if error.response.status_code in (401, 403) else ""
        return f"the Hub answered with status {error.response.status_code}: {message}{hint}"
    if isinstance(error, httpx2.TransportError | OSError):
        cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return f"the Hub at {constants.ENDPOINT} cannot be reached ({cause}); check the network, or name local files"
    return f"{constants.ENDPOINT} did not answer as a Hub does ({type(error).__name__}: {error})"


def _client() -> httpx2.Client:
    """The library's HTTP client, which sends the access token to the Hub alone.

    The address of a listing's next page comes from the server, and the library sends the token wherever it points.
    """
    client = default_client_factory()
    client.event_hooks["request"].append(_without_token_for_others)
    return client


def _without_token_for_others(request: httpx2.Request) -> None:
    if _server(str(request.url)) != _server(constants.ENDPOINT):
        request.headers.pop("Authorization", None)


def _server(address: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(address)
    return parts.scheme, parts.hostname, parts.port


set_client_factory(_client)
logging.set_verbosity_error()  # Each retry is a warning, which quotes the address; the last failure is an error here.
