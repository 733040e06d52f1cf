"""Corpus files on the Hugging Face Hub and in object stores, read over the network in ranges, without a download.

An address has any protocol that `fsspec` has a package for: ``hf://datasets/owner/name[@revision][/path]``,
``s3://bucket/path``, …; a path may be a file, a folder or a glob. We add what the packages (fsspec 2026.9,
huggingface_hub 2.4) do not do: all processes read the same content (that of one commit, or with one id); an answer is
the range that was asked for; the Hub's token goes to the Hub alone.
"""

import errno
import io
from contextlib import suppress
from datetime import datetime
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import fsspec
import httpx2
from fsspec.spec import AbstractBufferedFile
from huggingface_hub import HfApi, constants, errors, set_client_factory
from huggingface_hub.utils import logging, parse_hf_uri
from huggingface_hub.utils._http import default_client_factory  # in no public module, though `set_client_factory` is

from zerokara.base.errors import Fault, RunError, UserError, check_hub_token, holding, redacted
from zerokara.base.manifest import FileRecord

HUB = "hf://"
_AGREE = f"agree on its page at {constants.ENDPOINT}, then set HF_TOKEN or run: hf auth login"
CONVERSION = "; the Hub's own conversion, where it made one, is hf://datasets/owner/name@refs/convert/parquet"
_CONTENT_IDS = (
    *("md5Hash", "ETag", "etag", "checksum", "Content-MD5", "Digest", "sha", "mtime", "modificationTime"),
    *("LastModified", "Last-Modified", "last_modified", "modified", "modify", "created"),
)
"""Names that packages give to what changes with a file's content, the best first."""


def find(address: str, where: str) -> list[FileRecord]:
    """List the files at an address, sorted by name; `where` is its place in the configuration.

    Raises UserError if it does not exist, this user may not see it, or a package is missing; for other errors RunError.
    """
    parts = urlsplit(address)
    if parts.password or (parts.scheme in ("http", "https") and parts.query):
        rule = "has a password or a query, which would be kept in files"
        raise UserError(Fault(where, rule, value=address, remedy="give secrets by the environment, or download it"))
    if parts.scheme not in fsspec.available_protocols():
        raise UserError(Fault(where, "is of a protocol that fsspec does not know", value=address))
    if address.startswith(HUB):
        check_hub_token()
    pinned = address
    try:
        if address.startswith(HUB):  # the commit in place of a branch or a tag
            dataset = parse_hf_uri(address)
            if dataset.type != "dataset":
                raise errors.HfUriError(address, "not a dataset")
            revision, patience = dataset.revision or "main", constants.HF_HUB_ETAG_TIMEOUT
            sha = HfApi().dataset_info(dataset.id, revision=revision, timeout=patience).sha
            pinned = f"{HUB}datasets/{dataset.id}@{sha}/{dataset.path_in_repo}".rstrip("/")
        files, path = fsspec.url_to_fs(pinned)
        with suppress(FileNotFoundError):
            if (about := files.info(path))["type"] == "file":
                return [_found(files, about)]
        look = files.glob if fsspec.core.has_magic(path) else files.find
        listed = look(path, detail=True).values()
        found = sorted((_found(files, about) for about in listed if about["type"] == "file"), key=lambda one: one.path)
        if not found:
            folder, beside = path.rpartition("/")[0], list[str]()
            with suppress(Exception):  # only a hint for a mistyped name
                beside = [name.rpartition("/")[2] for name in files.ls(folder, detail=False)]
            raise FileNotFoundError(f"nothing is there; {folder} {holding(beside)}")
        return found
    except Exception as error:  # Whatever a network, a proxy or a package may raise; worded, never swallowed.
        raise _worded(error, address, where) from error


def open_file(file: FileRecord, buffer_bytes: int) -> BinaryIO:
    """Open a file as a seekable stream; with `buffer_bytes` 0 it fetches only what it is asked for.

    Opening and reading raise OSError if it has changed, or if the network fails for longer than the retries last.
    """
    cache = {"cache_type": "readahead" if buffer_bytes else "none", "block_size": 4 * buffer_bytes}
    try:
        stream = _RemoteStream(file, **cache)
    except Exception as error:
        raise OSError(errno.EIO, redacted(f"opening failed: {_message(error)}"), file.path) from error
    return io.BufferedReader(stream, buffer_bytes) if buffer_bytes else stream


class _RemoteStream(AbstractBufferedFile):
    """The bytes of a remote file, of which each answer is checked."""

    def __init__(self, file: FileRecord, **cache: Any):
        files, path = fsspec.url_to_fs(file.path)
        size = {"size": file.bytes} if file.path.startswith(HUB) else {}  # else it lists the folder again
        self._file, self._inner = file, files.open(path, "rb", cache_type="none", **size)
        if not size:
            now = _found(files, getattr(self._inner, "details", None) or files.info(path))
            # A listing may tell less than the file itself.
            is_known = now.sha256.partition(":")[0] == file.sha256.partition(":")[0]
            if now.bytes != file.bytes or (is_known and now.sha256 != file.sha256):
                raise RuntimeError(f"it changed since it was listed: it had {file.bytes:,} bytes, now {now.bytes:,}")
        super().__init__(files, path, size=file.bytes, **cache)

    def _fetch_range(self, start: int, end: int) -> bytes:
        end = min(end, self._file.bytes)
        try:
            self._inner.seek(start)
            content: bytes = self._inner.read(end - start)
            if len(content) != end - start:  # a server that ignores the header sends the whole file
                raise RuntimeError(f"the server sends {len(content):,} bytes where {end - start:,} were asked for")
            return content
        except Exception as error:
            action = f"reading bytes {start:,} to {end:,} of {self._file.bytes:,}"
            raise OSError(errno.EIO, redacted(f"{action} failed: {_message(error)}"), self._file.path) from error


def _found(files: Any, about: dict[str, Any]) -> FileRecord:
    """Record of a file from a package's description of it."""
    if "blob_id" in about:  # on the Hub
        content = about["lfs"]["sha256"] if about["lfs"] else f"git:{about['blob_id']}"
    else:
        key = next((key for key in _CONTENT_IDS if about.get(key)), "")
        value = about.get(key)
        value = value.timestamp() if isinstance(value, datetime) else value
        content = f"{key.lower()}:{value}".replace('"', "") if key else ""
    return FileRecord(files.unstrip_protocol(about["name"]), about["size"] or 0, content, modified_ns=0)


def _message(error: BaseException) -> str:
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, and a Hub dataset is read over the network; unset it, or name local files"
    if isinstance(error, errors.GatedRepoError):  # which lists its files to everyone
        return f"its owner admits only users who agreed to the terms; {_AGREE}"
    if isinstance(error, errors.HfHubHTTPError):
        message = error.server_message or str(error).strip().splitlines()[0]
        hint = "; check HF_TOKEN, or run: hf auth login" if error.response.status_code in (401, 403) else ""
        return f"the Hub answered with status {error.response.status_code}: {message}{hint}"
    cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, httpx2.TransportError | OSError):
        return f"the server cannot be reached ({cause}); check the network, or name local files"
    return f"the server did not answer as it should ({cause})"


def _worded(error: BaseException, address: str, where: str) -> UserError | RunError:
    """Error of a step for whatever a package raised."""
    remedy = "check the name; if it is private, set HF_TOKEN or run: hf auth login"
    match error:
        case ImportError():
            package = getattr(error.__cause__, "name", None) or error
            rule = f"needs the package {package}, which is not installed"
            remedy = f'run: .venv/bin/pip install {package} "fsspec=={fsspec.__version__}"'
        case errors.HfUriError():
            rule = "is not the name of a Hub dataset"
            remedy = f"write {HUB}datasets/owner/name, or {HUB}datasets/owner/name@revision/path"
        case errors.GatedRepoError():
            rule, remedy = "is of a gated dataset: its owner lets in only who agreed to the terms", _AGREE
        case errors.RevisionNotFoundError():
            rule, remedy = "names a revision that the dataset does not have", "name a branch, a tag or a commit"
        case errors.RepositoryNotFoundError():
            rule = f"names no dataset at {constants.ENDPOINT} that you may see"
        case FileNotFoundError():
            rule, remedy = f"names no file: {error}", "check the name"
        case PermissionError():
            rule, remedy = f"may not be read: {error}", "check the credentials in the environment"
        case _:
            return RunError(f"{where}: {address}: {_message(error)}")
    return UserError(Fault(where, rule, value=address, remedy=remedy))


def _client() -> httpx2.Client:
    """HTTP client of the Hub library that sends the access token to the Hub alone."""

    # The address of a listing's next page comes from the server, and the library sends the token wherever it points.
    def keep_token(request: httpx2.Request) -> None:
        hub, other = urlsplit(constants.ENDPOINT), urlsplit(str(request.url))
        if (hub.scheme, hub.hostname, hub.port) != (other.scheme, other.hostname, other.port):
            request.headers.pop("Authorization", None)

    client = default_client_factory()
    client.event_hooks["request"].append(keep_token)
    return client


set_client_factory(_client)
logging.set_verbosity_error()  # Each retry is a warning, which quotes the address; the last failure is an error here.
