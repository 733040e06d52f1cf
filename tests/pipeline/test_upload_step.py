"""Step 6 as a user starts it, against a Hub on loopback: what arrives, what is refused, and with which exit code."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hub_server
import pytest

from zerokara import manifest
from zerokara.huggingface.exported_folder import MANIFEST_NAME, STEP, UPLOAD_RECORD_NAME

NAME = "ada/first"


@pytest.fixture
def hub() -> Iterator[Any]:
    with hub_server.running(hub_server.Hub()) as running:
        yield running


def export_folder(folder: Path, *, holds: bool = True) -> Path:
    """A folder as step 4 leaves it: small files, two kept outside git, and one that is not part of the export."""
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# first\n", encoding="utf-8")
    (folder / "config.json").write_text("{}\n", encoding="utf-8")
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"one" * 3000)
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"two" * 4000)
    outputs = {"all": sorted(folder.iterdir())}
    facts = {
        "proof": {"holds": holds},
        "model": {"auto_class": "AutoModelForCausalLM", "task": "text-generation"},
        "samples": [{"prompt": "Ana are"}],
    }
    manifest.write(folder / MANIFEST_NAME, manifest.StepSpec(STEP, {}), outputs, facts, 1.0)
    (folder / "stray.txt").write_text("private notes", encoding="utf-8")
    return folder


class User:
    """Someone who runs ``python 6_upload.py`` in a folder of their own."""

    def __init__(self, root: Path, place: Path, url: str):
        self.root, self.place, self.url = root, place, url
        self.folder = place / "export"
        self.home = place / "home"
        self.environment: dict[str, str] = {}

    def run(self, *arguments: str, token: str | None = hub_server.TOKEN, **environment: str) -> Any:
        settings = [f"output_tokenizer_and_model_dir={self.folder}", f"huggingface_name={NAME}"]
        options = [word for setting in settings for word in ("--set", setting)]
        (self.place / "convert.yaml").write_text("private: true\n", encoding="utf-8")
        clean = {key: text for key, text in os.environ.items() if not key.startswith(("HF_", "HUGGING_FACE"))}
        own = {
            "HF_ENDPOINT": self.url, "HF_HOME": str(self.home), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1",
        }  # fmt: skip
        if token is not None:
            own["HF_TOKEN"] = token
        command = [sys.executable, str(self.root / "6_upload.py"), "--config", "convert.yaml", *options, *arguments]
        assert hub_server.TOKEN not in " ".join(command)
        return subprocess.run(
            command,
            cwd=self.place,
            env=clean | own | self.environment | environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def assert_token_nowhere(self, *runs: Any) -> None:
        for run in runs:
            assert hub_server.TOKEN not in run.stdout + run.stderr
        for path in self.place.rglob("*"):
            if path.is_file():
                assert hub_server.TOKEN.encode() not in path.read_bytes(), path


@pytest.fixture
def user(root: Path, tmp_path: Path, hub: Any) -> User:
    made = User(root, tmp_path, hub.url)
    export_folder(made.folder)
    return made


def test_everything_of_the_manifest_arrives_and_nothing_else(user: User, hub: Any) -> None:
    first = user.run()
    assert first.returncode == 0, first.stderr
    repository = hub.repositories[NAME]
    assert repository.private and repository.commits == 1
    sent = {path: content for path, content in repository.files.items() if path != ".gitattributes"}
    names = ["README.md", "config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert sent == {name: (user.folder / name).read_bytes() for name in names}
    assert repository.outside_git == set(names[2:])

    again = user.run()
    assert again.returncode == 0, again.stderr
    assert repository.commits == 1 and hub.count("PUT") == 2
    user.assert_token_nowhere(first, again)


def test_a_dry_run_lists_files_and_bytes_without_network_or_token(user: User, hub: Any) -> None:
    run = user.run("--dry-run", token=None)
    assert run.returncode == 0, run.stderr
    assert "model-00001-of-00002.safetensors" in run.stdout and "9,000 bytes" in run.stdout
    assert "stray" not in run.stdout
    following = shlex.split(run.stdout.splitlines()[-1].removeprefix("next: "))
    assert following[2:4] == ["--config", "convert.yaml"] and f"huggingface_name={NAME}" in following
    unnamed = user.run("--dry-run", "--set", "huggingface_name=''", token=None)
    assert unnamed.returncode == 0 and "9,000 bytes" in unnamed.stdout, unnamed.stderr
    assert "huggingface_name: user/name into convert.yaml" in unnamed.stdout.splitlines()[-1]
    assert hub.requests == []


def test_without_a_token_it_says_how_to_get_one(user: User, hub: Any) -> None:
    run = user.run(token=None)
    assert run.returncode == 2
    assert "hf auth login" in run.stderr and "HF_TOKEN" in run.stderr
    assert hub.requests == []


def test_a_login_on_this_machine_serves_as_well(user: User, hub: Any) -> None:
    user.home.mkdir()
    (user.home / "token").write_text(hub_server.TOKEN, encoding="utf-8")
    run = user.run(token=None)
    assert run.returncode == 0, run.stderr
    (user.home / "token").unlink()
    user.assert_token_nowhere(run)


def test_a_wrong_token_is_refused_and_not_shown(user: User) -> None:
    run = user.run(token="hf_wrong_one")
    assert run.returncode == 1
    assert "HF_TOKEN" in run.stderr and "hf_wrong_one" not in run.stdout + run.stderr


def test_a_foreign_namespace_is_refused_with_the_names_that_are_ours(user: User, hub: Any) -> None:
    run = user.run("--set", "huggingface_name=somebody/first")
    assert run.returncode == 1
    assert "403" in run.stderr and "ada" in run.stderr and "team" in run.stderr
    assert hub.repositories == {}


@pytest.mark.parametrize(
    "name",
    ["", "ada/a--b", "ada first"],
)
def test_a_bad_name_is_the_users_fault(user: User, hub: Any, name: str) -> None:
    run = user.run("--set", f"huggingface_name={name!r}")
    assert run.returncode == 2 and "huggingface_name" in run.stderr
    assert hub.requests == []


def test_a_failing_commit_ends_with_1_and_the_next_run_completes(user: User, hub: Any) -> None:
    hub.fail_commit = 500
    first = user.run()
    assert first.returncode == 1
    assert "status 500" in first.stderr and "the Hub stumbled" in first.stderr and "Traceback" not in first.stderr
    assert len(hub.storage) == 2 and hub.count("PUT") == 2

    hub.fail_commit = None
    second = user.run()
    assert second.returncode == 0, second.stderr
    assert hub.count("PUT") == 2, "what had arrived was sent again"
    user.assert_token_nowhere(first, second)


def test_an_interrupted_upload_resumes_with_what_is_missing(user: User, hub: Any) -> None:
    hub.fail_put_after = 1
    first = user.run()
    assert first.returncode == 1 and "the storage broke down" in first.stderr
    assert hub_server.SIGNATURE not in first.stderr
    assert hub.repositories[NAME].commits == 0 and len(hub.storage) == 1

    hub.fail_put_after = None
    hub.requests.clear()
    second = user.run()
    assert second.returncode == 0, second.stderr
    assert hub.count("PUT") == 1
    user.assert_token_nowhere(first, second)


@pytest.mark.parametrize("switch", [{"fail_put_after": 0}, {"fail_commit": 403}, {"fail_commit": 500}])
def test_what_a_server_quotes_of_addresses_and_tokens_is_not_repeated(user: User, hub: Any, switch: Any) -> None:
    hub.quotes = True
    for name, value in switch.items():
        setattr(hub, name, value)
    user.home.mkdir()
    (user.home / "token").write_text(hub_server.TOKEN, encoding="utf-8")  # known by its form alone
    run = user.run(token=None)
    (user.home / "token").unlink()
    assert run.returncode == 1 and "was the answer to http://127.0.0.1" in run.stderr and "Traceback" not in run.stderr
    assert "X-Amz" not in run.stderr and hub_server.SIGNATURE not in run.stderr
    user.assert_token_nowhere(run)


@pytest.mark.parametrize("proxy", ["http://ada:pass%2Fword@127.0.0.1:9", "odd://ada:pass%2Fword@127.0.0.1:9"])
def test_the_password_of_a_proxy_is_not_told(user: User, proxy: str) -> None:
    run = user.run(HTTP_PROXY=proxy, http_proxy=proxy, ALL_PROXY=proxy, NO_PROXY="", no_proxy="")
    assert run.returncode == 1 and "pass%2Fword" not in run.stderr + run.stdout


def streamed(user: User, hub: Any) -> None:
    """Let uploads go the way of Xet, as they do by default; the server has none, so all files are in git."""
    hub.lfs_bytes = 1 << 20
    user.environment = {"HF_HUB_DISABLE_XET": "0"}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_two_uploads_at_once_never_mix(user: User, hub: Any, is_streamed: bool) -> None:
    if is_streamed:
        streamed(user, hub)
    hub.repositories[NAME] = hub_server.Repository(private=True)
    hub.awaited_commits = threading.Barrier(2)
    other = User(user.root, user.place / "elsewhere", user.url)
    other.environment = user.environment
    export_folder(other.folder)
    (other.folder / "config.json").write_text('{"other": 1}\n', encoding="utf-8")
    made = manifest.read(other.folder / MANIFEST_NAME)
    paths = [other.folder / record.path for record in made.outputs["all"]]
    manifest.write(other.folder / MANIFEST_NAME, manifest.StepSpec(STEP, {}), {"all": paths}, made.facts, 1.0)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(User.run, (user, other))
    assert sorted((first.returncode, second.returncode)) == [0, 1], first.stderr + second.stderr
    lost, winner = (first, other) if first.returncode else (second, user)
    assert "ada/first" in lost.stderr and "Traceback" not in lost.stderr
    assert hub.repositories[NAME].commits == 1
    assert hub.repositories[NAME].files["config.json"] == (winner.folder / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("switch", "path", "difference"),
    [
        ("hide_from_listing", "model-00002-of-00002.safetensors", "missing"),
        ("spoil_in_listing", "model-00001-of-00002.safetensors", "sha256 000"),
        ("spoil_in_listing", "config.json", "git blob 000"),
    ],
)
def test_a_listing_that_differs_ends_with_1(user: User, hub: Any, switch: str, path: str, difference: str) -> None:
    getattr(hub, switch).add(path)
    run = user.run()
    assert run.returncode == 1
    assert f"{path}: {difference}" in run.stderr


def test_a_public_repository_is_not_filled_where_private_is_asked(user: User, hub: Any) -> None:
    hub.repositories[NAME] = hub_server.Repository(private=False)
    run = user.run()
    assert run.returncode == 2 and NAME in run.stderr
    assert hub.repositories[NAME].commits == 0 and hub.storage == {}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_other_files_in_the_repository_stop_it_unless_redo(user: User, hub: Any, is_streamed: bool) -> None:
    if is_streamed:
        streamed(user, hub)
    hub.repositories[NAME] = hub_server.Repository(private=True)
    hub.repositories[NAME].files["old [1].bin"] = b"old"
    run = user.run()
    assert run.returncode == 2 and "old [1].bin" in run.stderr and "--redo" in run.stderr
    assert hub.repositories[NAME].commits == 0
    run = user.run("--redo")
    assert run.returncode == 0, run.stderr
    assert hub.repositories[NAME].commits == 1
    sent = hub.repositories[NAME].files.keys() - {".gitattributes"}
    assert sent == {path.name for path in user.folder.iterdir()} - {MANIFEST_NAME, UPLOAD_RECORD_NAME, "stray.txt"}
    assert is_streamed == ("Found 4 files" in run.stderr), "nothing is told where there is no terminal"


def test_a_folder_that_was_not_proved_is_refused(user: User, hub: Any) -> None:
    user.folder = export_folder(user.place / "unproved", holds=False)
    run = user.run()
    assert run.returncode == 2 and str(user.folder / MANIFEST_NAME) in run.stderr
    user.folder = user.place / "nothing"
    run = user.run()
    assert run.returncode == 2 and str(user.folder) in run.stderr and "step 4" in run.stderr
    assert hub.requests == []


def test_files_changed_since_the_proof_are_all_named(user: User, hub: Any) -> None:
    (user.folder / "config.json").write_text("[]\n", encoding="utf-8")
    (user.folder / "README.md").unlink()
    run = user.run()
    assert run.returncode == 2
    assert "config.json: " in run.stderr and "README.md: " in run.stderr
    assert hub.requests == []


def test_a_manifest_that_names_a_file_elsewhere_sends_nothing(user: User, hub: Any) -> None:
    (user.place / "diary.txt").write_text("mine", encoding="utf-8")
    path = user.folder / MANIFEST_NAME
    path.write_text(path.read_text(encoding="utf-8").replace("config.json", "../diary.txt"), encoding="utf-8")
    run = user.run()
    assert run.returncode == 2 and "../diary.txt" in run.stderr
    assert hub.requests == []


def test_an_unreachable_hub_is_an_error_within_seconds(user: User) -> None:
    with socket.socket() as unused:  # bound and not listening: nothing else can take the port
        unused.bind(("127.0.0.1", 0))
        user.url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        started = time.monotonic()
        run = user.run()
    assert run.returncode == 1 and user.url in run.stderr
    assert time.monotonic() - started < 20
    user.assert_token_nowhere(run)


@pytest.mark.parametrize("quotes", [False, True])
def test_a_refusal_on_the_way_of_xet_is_told_and_its_log_holds_no_token(user: User, hub: Any, quotes: bool) -> None:
    hub.quotes = quotes
    run = user.run(HF_HUB_DISABLE_XET="0")  # the server has no Xet
    assert run.returncode == 1 and "xet" in run.stderr and "Traceback" not in run.stderr
    assert list(user.home.rglob("*.log")), "Xet writes its log elsewhere now: look there"
    user.assert_token_nowhere(run)


def test_offline_mode_is_named(user: User) -> None:
    run = user.run(HF_HUB_OFFLINE="1")
    assert run.returncode == 1 and "HF_HUB_OFFLINE" in run.stderr


def test_a_server_that_is_no_hub_gives_an_error_and_no_traceback(user: User, hub: Any) -> None:
    user.url = hub.url + "/elsewhere"
    run = user.run()
    assert run.returncode == 1 and "404" in run.stderr and "Traceback" not in run.stderr
