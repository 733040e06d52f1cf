"""An exported folder → a repository on the Hugging Face Hub, and the comparison of what lies there with what was sent.

In: a folder whose manifest says that it was proved. Out: one commit that holds exactly the files of the manifest.
One commit, because then nobody ever meets half a model; large files are sent ahead of it, one by one, and what the Hub
has already (by SHA-256, or by chunks with Xet) is not sent again, so that a second run goes on where the first broke.

The token is found by huggingface_hub itself (``HF_TOKEN`` or ``hf auth login``) and never passes through here.
Written for huggingface_hub 2.4 (its `upload_folder` makes several commits, and it sends by pattern, not by list).
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerokara.errors import RunError, UserError, redacted
from zerokara.manifest import FileRecord
from zerokara.progress import bytes_text

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi

CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 300.0
"""huggingface_hub waits for ever by default; a commit of many files may take the Hub minutes to answer."""
SENT_AHEAD_BYTES = 10_000_000
"""Larger files go one by one before the commit; the Hub keeps files over 10 MB outside git in any case."""
HUBS_OWN_FILES = frozenset({".gitattributes"})
LOGIN_HINT = "log in with `hf auth login`, or put a token with write access into the environment as HF_TOKEN"


@dataclass(frozen=True)
class RemoteFile:
    """One file as the Hub lists it."""

    bytes: int
    blob_id: str
    """Git's hash of the content (of the pointer, for a file kept outside git)."""
    sha256: str | None
    """For files that the Hub keeps outside git."""


@dataclass(frozen=True)
class Uploaded:
    """Where the model lies now."""

    url: str
    commit: str
    private: bool
    num_files_sent: int
    """0 when everything was there already."""


def check_name(name: str) -> str | None:
    """What is wrong with a repository name, or None."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        return str(error)
    return None


def upload(
    folder: Path, files: Sequence[FileRecord], repository: str, *, private: bool, replace: bool = False
) -> Uploaded:
    """Send `files` of `folder` and check that they arrived; `replace` deletes what else lies in the repository.

    Raises:
        UserError: no token, or the repository is public where it must be private, or holds other files.
        RunError: the Hub refused or could not be reached, or what lies there is not what was sent.
    """
    api = _api()
    account: list[str] = []
    with _told(repository, account):
        account += _namespaces(api)
        is_private, parent = _make_repository(api, repository, private)
        there = _listing(api, repository, parent)
        strays = sorted(there.keys() - {record.path for record in files} - HUBS_OWN_FILES)
        if strays and not replace:
            raise UserError(
                f"{repository} on the Hub holds files that are no part of this export: {', '.join(strays)}; run again "
                "with --redo to delete them in the same commit (the Hub's history keeps them), or choose another name"
            )
        url = redacted(f"{api.endpoint}/{repository}")  # HF_ENDPOINT may hold a password
        if not strays and not differences(folder, files, there):
            return Uploaded(url, parent, is_private, 0)
        commit = _send(api, folder, files, repository, strays, parent)
        there = _listing(api, repository, commit)
    wrong = differences(folder, files, there)
    if wrong:
        listed = "\n".join(f"  {line}" for line in wrong)
        raise RunError(
            f"what lies at {url} (commit {commit}) is not what was sent:\n{listed}\nRun the same command again; what "
            "did arrive is not sent twice."
        )
    return Uploaded(url, commit, is_private, len(files))


def differences(folder: Path, files: Sequence[FileRecord], there: Mapping[str, RemoteFile]) -> list[str]:
    """Every way in which a remote listing is not the local manifest: paths, sizes, hashes."""
    found = []
    for record in files:
        remote = there.get(record.path)
        if remote is None:
            found.append(f"{record.path}: missing on the Hub")
        elif remote.bytes != record.bytes:
            found.append(f"{record.path}: {remote.bytes:,} bytes on the Hub, {record.bytes:,} here")
        elif remote.sha256 is not None and remote.sha256 != record.sha256:
            found.append(f"{record.path}: sha256 {remote.sha256} on the Hub, {record.sha256} here")
        elif remote.sha256 is None and remote.blob_id != (blob_id := git_blob_id(folder / record.path)):
            found.append(f"{record.path}: git blob {remote.blob_id} on the Hub, {blob_id} here")
    expected = {record.path for record in files} | HUBS_OWN_FILES
    found += [f"{path}: on the Hub and no part of this export" for path in sorted(there.keys() - expected)]
    return found


def git_blob_id(path: Path) -> str:
    """Git's name of a file's content: SHA-1 over ``blob <size>``, a zero byte, and the content."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _api() -> HfApi:
    from huggingface_hub import HfApi, set_client_factory
    from huggingface_hub.utils import disable_progress_bars, logging
    from huggingface_hub.utils._http import default_client_factory

    def client() -> Any:
        made = default_client_factory()
        # Seconds to connect, for one piece to be sent or to come, and for a free connection.
        made.timeout = (CONNECT_SECONDS, ANSWER_SECONDS, ANSWER_SECONDS, CONNECT_SECONDS)
        return made

    set_client_factory(client)
    # Its warnings repeat signed storage addresses; what went wrong in the end is told here.
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        disable_progress_bars()
    return HfApi(library_name="zerokara")


def _namespaces(api: HfApi) -> list[str]:
    """The names under which the token's owner may have repositories: the user first."""
    owner = api.whoami()
    return [str(owner["name"]), *(str(each["name"]) for each in owner.get("orgs", []))]


def _make_repository(api: HfApi, repository: str, private: bool) -> tuple[bool, str]:
    """Create the repository unless it is there; gives whether it is private, and its newest commit."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        info = api.model_info(repository)
    except RepositoryNotFoundError:
        api.create_repo(repository, private=private, exist_ok=True)
        info = api.model_info(repository)
    if private and not info.private:
        raise UserError(
            f"{repository} is there already and is public, but private is true in the configuration; make it private "
            f"at {api.endpoint}/{repository}/settings, set private: false, or choose another huggingface_name"
        )
    return bool(info.private), str(info.sha)


def _listing(api: HfApi, repository: str, revision: str) -> dict[str, RemoteFile]:
    from huggingface_hub.hf_api import RepoFile

    return {
        entry.path: RemoteFile(entry.size, entry.blob_id, entry.lfs.sha256 if entry.lfs else None)
        for entry in api.list_repo_tree(repository, recursive=True, revision=revision)
        if isinstance(entry, RepoFile)
    }


def _send(
    api: HfApi, folder: Path, files: Sequence[FileRecord], repository: str, strays: Sequence[str], parent: str
) -> str:
    """Send the large files, then commit on top of `parent`, which was looked at, and of no other; gives the commit."""
    from huggingface_hub import CommitOperationDelete

    additions = [_addition(folder, record) for record in files]
    large = [each for each in additions if each.upload_info.size >= SENT_AHEAD_BYTES]
    for number, each in enumerate(large, start=1):
        print(f"sending {number}/{len(large)}: {each.path_in_repo}, {bytes_text(each.upload_info.size)}", flush=True)
        api.preupload_lfs_files(repository, [each], free_memory=False)
    deletions = [CommitOperationDelete(path) for path in strays]
    print(f"committing {len(files)} files", flush=True)
    done = api.create_commit(
        repository, [*additions, *deletions], commit_message="Upload by zerokara", parent_commit=parent
    )
    return str(done.oid)


def _addition(folder: Path, record: FileRecord) -> CommitOperationAdd:
    from huggingface_hub import CommitOperationAdd

    addition = CommitOperationAdd(record.path, folder / record.path)
    # Known from the manifest, which was checked a moment ago: saves reading gigabytes once more.
    addition.upload_info.sha256 = bytes.fromhex(record.sha256)
    return addition


@contextmanager
def _told(repository: str, account: Sequence[str]) -> Iterator[None]:
    """Turn what huggingface_hub raises into words; nothing is swallowed."""
    import httpx2
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    again = "run the same command again: what has arrived is not sent twice"
    try:
        yield
    except LocalTokenNotFoundError as error:
        raise UserError(f"there is no Hugging Face token: {LOGIN_HINT}") from error
    except OfflineModeIsEnabled as error:
        raise RunError("huggingface_hub is told to stay offline; unset HF_HUB_OFFLINE") from error
    except (HfHubHTTPError, httpx2.HTTPError, RuntimeError, ValueError, OSError) as error:
        # Errors of its upload threads come wrapped in a RuntimeError.
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        if isinstance(cause, HfHubHTTPError):
            raise RunError(f"{_refusal(cause, repository, account)}; {again}") from error
        if isinstance(cause, httpx2.HTTPError):
            words = f"the Hub cannot be reached at {constants.ENDPOINT} ({type(cause).__name__}: {cause})"
            raise RunError(f"{words}; check the network or the proxy, then {again}") from error
        raise RunError(f"the upload to {repository} failed ({type(cause).__name__}: {cause}); {again}") from error


def _refusal(error: Any, repository: str, account: Sequence[str]) -> str:
    """What the Hub said, and what it means."""
    response = error.response
    status, address = response.status_code, response.url
    said = f" ({error.server_message})" if error.server_message else ""
    namespace = repository.partition("/")[0]
    if status == 401:
        return f"the Hub does not know the token{said}; {LOGIN_HINT}"
    if status in (403, 404):
        mine = f"the token belongs to {account[0]}" if account else "the token's owner is unknown"
        others = f" (organisations: {', '.join(account[1:])})" if account[1:] else ""
        return (
            f"the Hub refuses {repository} with status {status}{said}: {mine}{others}; check that {namespace} is "
            "this user or an organisation it may write to, and that the token has write access"
        )
    if status in (409, 412):
        return (
            f"somebody else changed {repository} while this upload was under way{said}; nothing of theirs was "
            "replaced. See on the Hub, under Files and versions, what they committed; to put this export on top of it"
        )
    if status == 429:
        return f"the Hub asks for patience{said}: too many requests; wait some minutes"
    return f"the Hub answered with status {status} at {address}{said}"
