"""Upload of an exported folder to the Hugging Face Hub, and comparison of the files there with those sent.

In: a folder with a proved manifest. Out: a commit after which the repository holds exactly the files of the manifest.
The token is found by huggingface_hub itself (``HF_TOKEN`` or ``hf auth login``) and never passes through here.

Written for huggingface_hub 2.4: `upload_folder` sends the large files first, nothing that the Hub has already (by
SHA-256, or by chunks with Xet), retries, and makes one commit of up to 250 files with 100 MB outside the large ones.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from logging import LogRecord
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, constants, set_client_factory
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import disable_progress_bars, logging
from huggingface_hub.utils._http import default_client_factory
from huggingface_hub.utils.sha import git_hash

from zerokara.base.errors import Fault, RunError, UserError, check_hub_token, redacted
from zerokara.base.manifest import FileRecord
from zerokara.publishing.exported_folder import CARD_NAME

CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 300.0
"""huggingface_hub waits forever by default; the Hub may take minutes to answer a commit of many files."""
HUBS_OWN_FILES = frozenset({".gitattributes"})
_MESSAGE = "Upload by zerokara"
_RESUME = "Run the same command again: what arrived is not sent twice."
LOGIN_HINT = "log in with `hf auth login`, or put a token with write access into the environment as HF_TOKEN"


@dataclass(frozen=True)
class Uploaded:
    url: str
    commit: str
    private: bool
    num_files_sent: int
    """0 when everything was there already."""


def upload(
    folder: Path, files: Sequence[FileRecord], repository: str, *, private: bool, replace: bool = False
) -> Uploaded:
    """Upload `files` of `folder` and check that they arrived; `replace` discards other files and edits on the Hub.

    Raises:
        UserError: no token, or the repository is public though `private` is set, or holds other files, or a card that
            somebody edited there; or the Hub does not know the card's language or license.
        RunError: the Hub refused or could not be reached, or its files differ from what was sent.
    """
    check_hub_token()
    api = _api()
    account: list[str] = []  # the namespaces in which the token's owner may have repositories, the user first
    with _errors_explained(repository, account):
        owner = api.whoami()
        account += [owner["name"], *(each["name"] for each in owner.get("orgs", []))]
        url = redacted(f"{api.endpoint}/{repository}")  # HF_ENDPOINT may hold a password
        if not api.repo_exists(repository):
            api.create_repo(repository, private=private, exist_ok=True)
        info = api.model_info(repository)
        if private and not info.private:
            rule = "exists already and is public, but private is true in the configuration"
            remedy = f"make it private at {url}/settings, set private: false, or choose another huggingface_name"
            raise UserError(Fault(repository, rule, remedy=remedy))
        commit, is_private = str(info.sha), bool(info.private)
        remote = _listing(api, repository, commit)
        strays = sorted(remote.keys() - {record.path for record in files} - HUBS_OWN_FILES)
        if strays and not replace:
            rule = f"holds files on the Hub that are not part of this export: {', '.join(strays)}"
            remedy = "run again with --redo to delete them in the same commit (the Hub's history keeps them)"
            raise UserError(Fault(repository, rule, remedy=f"{remedy}, or choose another name"))
        lacking = differences(folder, files, remote)
        if not lacking:
            return Uploaded(url, commit, is_private, 0)
        if not replace and any(line.startswith(f"{CARD_NAME}: git") for line in lacking):
            (there,) = api.get_paths_info(repository, CARD_NAME, expand=True, revision=commit)
            if there.last_commit and there.last_commit.title != _MESSAGE:
                rule = f"holds a {CARD_NAME} that was edited on the Hub ({there.last_commit.title})"
                remedy = f"copy what is to stay into {folder / CARD_NAME}; then --redo replaces the one on the Hub"
                raise UserError(Fault(repository, rule, remedy=remedy))
        try:
            done = api.upload_folder(
                repo_id=repository,
                folder_path=folder,
                commit_message=_MESSAGE,
                parent_commit=commit,  # the one that was compared: of two uploads at once, the second is refused
                allow_patterns=[escape(record.path) for record in files],
                delete_patterns=[escape(path) for path in strays] or None,
            )
            commit = str(done.oid)
            remote = _listing(api, repository, commit)
        except (HfHubHTTPError, RuntimeError):  # the Hub may have made the commit, and only its answer was lost
            commit = str(api.model_info(repository).sha)
            remote = _listing(api, repository, commit)
            if differences(folder, files, remote):
                raise
    if wrong := differences(folder, files, remote):
        listed = "\n".join(f"  {line}" for line in wrong)
        raise RunError(f"the files at {url} (commit {commit}) differ from what was sent:\n{listed}\n{_RESUME}")
    return Uploaded(url, commit, is_private, len(lacking) - len(strays))


def differences(folder: Path, files: Sequence[FileRecord], remote: Mapping[str, RepoFile]) -> list[str]:
    """All differences of a remote listing from the local manifest: paths, sizes, hashes.

    The Hub names the SHA-256 of a file that it keeps outside git, and of any other git's hash of the content.
    """
    found = []
    for record in files:
        if (file := remote.get(record.path)) is None:
            found.append(f"{record.path}: missing on the Hub")
            continue
        if file.lfs:
            kind, there, here = "sha256", file.lfs.sha256, record.sha256
        else:
            kind, there, here = "git blob", file.blob_id, git_hash((folder / record.path).read_bytes())
        if (file.size, there) != (record.bytes, here):
            found.append(f"{record.path}: {kind} {there} ({file.size:,} bytes) there, {here} ({record.bytes:,}) here")
    expected = {record.path for record in files} | HUBS_OWN_FILES
    found += [f"{path}: on the Hub, but not part of this export" for path in sorted(remote.keys() - expected)]
    return found


def _api() -> HfApi:
    def client() -> httpx2.Client:
        http = default_client_factory()
        http.timeout = (CONNECT_SECONDS, ANSWER_SECONDS, ANSWER_SECONDS, CONNECT_SECONDS)  # connect, read, write, pool
        return http

    def without_secrets(record: LogRecord) -> bool:
        record.msg, record.args = redacted(record.getMessage()), None  # warnings quote signed storage addresses
        return True

    set_client_factory(client)
    for handler in logging.get_logger().handlers:
        handler.addFilter(without_secrets)
    logging.set_verbosity_info()  # where there is no terminal, a line about the progress every 30 seconds
    if not sys.stderr.isatty():
        disable_progress_bars()
    return HfApi(library_name="zerokara")


def _listing(api: HfApi, repository: str, revision: str) -> dict[str, RepoFile]:
    entries = api.list_repo_tree(repository, recursive=True, revision=revision)
    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


@contextmanager
def _errors_explained(repository: str, account: Sequence[str]) -> Iterator[None]:
    """Turn errors of huggingface_hub into explanations; none is swallowed."""
    try:
        yield
    except LocalTokenNotFoundError as error:
        raise UserError(Fault("Hugging Face", "there is no token", remedy=LOGIN_HINT)) from error
    except (HfHubHTTPError, httpx2.HTTPError, RuntimeError, ValueError, OSError) as error:
        # Errors in its upload threads are wrapped in a RuntimeError.
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        if isinstance(cause, ValueError) and CARD_NAME in str(cause):  # huggingface_hub's _validate_yaml
            rule = f"the Hub refuses the metadata of {CARD_NAME}: {' '.join(str(cause).split())}"
            remedy = f"set a language and a license that the Hub knows, or repair the YAML at the top of {CARD_NAME}"
            raise UserError(Fault(repository, rule, remedy=remedy)) from error
        message = f"the upload to {repository} failed ({type(cause).__name__}: {cause})"
        if isinstance(cause, HfHubHTTPError):
            status, reason = cause.response.status_code, f" ({cause.server_message})" if cause.server_message else ""
            message = f"the Hub refuses {repository} with status {status} at {cause.response.url}{reason}"
            owners = ", ".join(account) or "unknown"
            no_access = f"the token must have write access to {repository.partition('/')[0]}; it belongs to: {owners}"
            changed = "somebody else changed it during this upload, and their commit was not replaced: look at it there"
            causes = {401: LOGIN_HINT, 429: "wait some minutes"}
            causes |= dict.fromkeys((403, 404), no_access) | dict.fromkeys((409, 412), changed)
            message += f"; {causes[status]}" if status in causes else ""
        elif isinstance(cause, httpx2.HTTPError):
            message += f", {constants.ENDPOINT} cannot be reached: check the network or the proxy"
        raise RunError(f"{message}. {_RESUME}") from error
