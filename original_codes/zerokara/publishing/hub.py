"""The upload of an exported folder to the Hugging Face Hub, and the comparison of what is there with what was sent.

In: a folder with a proved manifest. Out: one commit that holds exactly the files of the manifest, so that nobody ever
sees half a model; large files are uploaded before it, one by one, and what the Hub already has (by SHA-256, or by
chunks with Xet) is not sent again, so that a second run resumes where the first was interrupted.

The token is found by huggingface_hub itself (``HF_TOKEN`` or ``hf auth login``) and never passes through here.
Written for huggingface_hub 2.4 (its `upload_folder` makes several commits, and it selects by pattern, not by list).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, set_client_factory
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import HFValidationError, disable_progress_bars, logging, validate_repo_id
from huggingface_hub.utils._http import default_client_factory
from huggingface_hub.utils.sha import git_hash

from zerokara.errors import RunError, UserError, redacted
from zerokara.manifest import FileRecord
from zerokara.progress import bytes_text

CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 300.0
"""huggingface_hub waits forever by default; the Hub may take minutes to answer a commit of many files."""
PREUPLOAD_BYTES = 10_000_000
"""Larger files are uploaded one by one before the commit; the Hub keeps files over 10 MB outside git in any case."""
HUBS_OWN_FILES = frozenset({".gitattributes"})
LOGIN_HINT = "log in with `hf auth login`, or put a token with write access into the environment as HF_TOKEN"


@dataclass(frozen=True)
class Uploaded:
    """The result of an upload."""

    url: str
    commit: str
    private: bool
    num_files_sent: int
    """0 when everything was there already."""


def check_name(name: str) -> str | None:
    """Return what is wrong with a repository name, or None."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        return str(error)
    return None


def upload(
    folder: Path, files: Sequence[FileRecord], repository: str, *, private: bool, replace: bool = False
) -> Uploaded:
    """Upload `files` of `folder` and check that they arrived; `replace` deletes other files in the repository.

    Raises:
        UserError: no token, or the repository is public though `private` is set, or holds other files.
        RunError: the Hub refused or could not be reached, or its files differ from what was sent.
    """
    api = _api()
    account: list[str] = []  # the namespaces in which the token's owner may have repositories, the user first
    with _errors_explained(repository, account):
        owner = api.whoami()
        account += [owner["name"], *(each["name"] for each in owner.get("orgs", []))]
        is_private, parent = _make_repository(api, repository, private)
        remote = _listing(api, repository, parent)
        strays = sorted(remote.keys() - {record.path for record in files} - HUBS_OWN_FILES)
        if strays and not replace:
            raise UserError(
                f"{repository} on the Hub holds files that are not part of this export: {', '.join(strays)}; run again "
                "with --redo to delete them in the same commit (the Hub's history keeps them), or choose another name"
            )
        url = redacted(f"{api.endpoint}/{repository}")  # HF_ENDPOINT may hold a password
        if not strays and not differences(folder, files, remote):
            return Uploaded(url, parent, is_private, 0)
        commit = _send(api, folder, files, repository, strays, parent)
        remote = _listing(api, repository, commit)
    wrong = differences(folder, files, remote)
    if wrong:
        listed = "\n".join(f"  {line}" for line in wrong)
        raise RunError(
            f"the files at {url} (commit {commit}) differ from what was sent:\n{listed}\nRun the same command again; "
            "what arrived is not sent twice."
        )
    return Uploaded(url, commit, is_private, len(files))


def differences(folder: Path, files: Sequence[FileRecord], remote: Mapping[str, RepoFile]) -> list[str]:
    """Every difference of a remote listing from the local manifest: paths, sizes, hashes.

    The Hub names the SHA-256 of a file that it keeps outside git, and of any other git's hash of the content.
    """
    found = []
    for record in files:
        file = remote.get(record.path)
        if file is None:
            found.append(f"{record.path}: missing on the Hub")
        elif file.size != record.bytes:
            found.append(f"{record.path}: {file.size:,} bytes on the Hub, {record.bytes:,} here")
        elif file.lfs and file.lfs.sha256 != record.sha256:
            found.append(f"{record.path}: sha256 {file.lfs.sha256} on the Hub, {record.sha256} here")
        elif not file.lfs and file.blob_id != (blob_id := git_hash((folder / record.path).read_bytes())):
            found.append(f"{record.path}: git blob {file.blob_id} on the Hub, {blob_id} here")
    expected = {record.path for record in files} | HUBS_OWN_FILES
    found += [f"{path}: on the Hub, but not part of this export" for path in sorted(remote.keys() - expected)]
    return found


def _api() -> HfApi:
    def client() -> Any:
        made = default_client_factory()
        # Seconds to connect, for one piece to be sent or to come, and for a free connection.
        made.timeout = (CONNECT_SECONDS, ANSWER_SECONDS, ANSWER_SECONDS, CONNECT_SECONDS)
        return made

    set_client_factory(client)
    # Its warnings repeat signed storage addresses; the final error is reported here.
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        disable_progress_bars()
    return HfApi(library_name="zerokara")


def _make_repository(api: HfApi, repository: str, private: bool) -> tuple[bool, str]:
    """Create the repository unless it exists; returns whether it is private, and its newest commit."""
    try:
        info = api.model_info(repository)
    except RepositoryNotFoundError:
        api.create_repo(repository, private=private, exist_ok=True)
        info = api.model_info(repository)
    if private and not info.private:
        raise UserError(
            f"{repository} exists already and is public, but private is true in the configuration; make it private "
            f"at {api.endpoint}/{repository}/settings, set private: false, or choose another huggingface_name"
        )
    return bool(info.private), str(info.sha)


def _listing(api: HfApi, repository: str, revision: str) -> dict[str, RepoFile]:
    entries = api.list_repo_tree(repository, recursive=True, revision=revision)
    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


def _send(
    api: HfApi, folder: Path, files: Sequence[FileRecord], repository: str, strays: Sequence[str], parent: str
) -> str:
    """Upload the large files, then commit on top of `parent` and no other commit; returns the commit."""
    additions = [_addition(folder, record) for record in files]
    large = [each for each in additions if each.upload_info.size >= PREUPLOAD_BYTES]
    for number, each in enumerate(large, start=1):
        print(f"uploading {number}/{len(large)}: {each.path_in_repo}, {bytes_text(each.upload_info.size)}", flush=True)
        api.preupload_lfs_files(repository, [each], free_memory=False)
    deletions = [CommitOperationDelete(path) for path in strays]
    print(f"committing {len(files)} files", flush=True)
    done = api.create_commit(
        repository, [*additions, *deletions], commit_message="Upload by zerokara", parent_commit=parent
    )
    return str(done.oid)


def _addition(folder: Path, record: FileRecord) -> CommitOperationAdd:
    addition = CommitOperationAdd(record.path, folder / record.path)
    # The manifest was checked a moment ago: this saves hashing gigabytes again.
    addition.upload_info.sha256 = bytes.fromhex(record.sha256)
    return addition


@contextmanager
def _errors_explained(repository: str, account: Sequence[str]) -> Iterator[None]:
    """Turn errors of huggingface_hub into explanations; none is swallowed."""
    again = "run the same command again: what arrived is not sent twice"
    try:
        yield
    except LocalTokenNotFoundError as error:
        raise UserError(f"there is no Hugging Face token: {LOGIN_HINT}") from error
    except OfflineModeIsEnabled as error:
        raise RunError("huggingface_hub is in offline mode; unset HF_HUB_OFFLINE") from error
    except (HfHubHTTPError, httpx2.HTTPError, RuntimeError, ValueError, OSError) as error:
        # Errors in its upload threads are wrapped in a RuntimeError.
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        if isinstance(cause, HfHubHTTPError):
            raise RunError(f"{_refusal(cause, repository, account)}; {again}") from error
        if isinstance(cause, httpx2.HTTPError):
            message = f"the Hub cannot be reached at {constants.ENDPOINT} ({type(cause).__name__}: {cause})"
            raise RunError(f"{message}; check the network or the proxy, then {again}") from error
        raise RunError(f"the upload to {repository} failed ({type(cause).__name__}: {cause}); {again}") from error


def _refusal(error: Any, repository: str, account: Sequence[str]) -> str:
    """The Hub's refusal and its likely cause."""
    response = error.response
    status, address = response.status_code, response.url
    reason = f" ({error.server_message})" if error.server_message else ""
    namespace = repository.partition("/")[0]
    if status == 401:
        return f"the Hub does not know the token{reason}; {LOGIN_HINT}"
    if status in (403, 404):
        mine = f"the token belongs to {account[0]}" if account else "the token's owner is unknown"
        others = f" (organisations: {', '.join(account[1:])})" if account[1:] else ""
        return (
            f"the Hub refuses {repository} with status {status}{reason}: {mine}{others}; check that {namespace} is "
            "this user or an organisation it may write to, and that the token has write access"
        )
    if status in (409, 412):
        return (
            f"somebody else changed {repository} during this upload{reason}; none of their files was replaced. See "
            "their commit on the Hub under Files and versions; to commit this export on top of it"
        )
    if status == 429:
        return f"too many requests to the Hub{reason}; wait some minutes"
    return f"the Hub answered with status {status} at {address}{reason}"
