"""Step 6 as a user starts it, against a Hub on loopback: what arrives, what is refused, and with which exit code."""

import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from configs import typed
from huggingface_hub import ModelCard
from pipeline import hub_server

from zerokara.base import manifest
from zerokara.publishing import exported_folder
from zerokara.publishing.exported_folder import STEP

NAME = "ada/first"


@pytest.fixture
def hub() -> Iterator[Any]:
    with hub_server.running(hub_server.Hub()) as running:
        yield running


SETTINGS = {"test_prompt_text": "auto"}
CARD = """---
language:
- ro
license: mit
---

# first

name = "first"
"""
AS_SENT = CARD.replace('"first"', f'"{NAME}"')


def export_folder(folder: Path, config: str = "{}\n") -> None:
    """A folder as step 4 leaves it: small files, two kept outside git, and one that is not part of the export."""
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(CARD, encoding="utf-8")
    (folder / "config.json").write_text(config, encoding="utf-8")
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"one" * 3000)
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"two" * 4000)
    card, *others = sorted(folder.iterdir())
    outputs: manifest.Paths = {"card": [card], "others": others}
    facts = {
        "proof": {"holds": True},
        "model": {"auto_class": "AutoModelForCausalLM", "task": "text-generation"},
        "samples": [{"prompt": "Ana are"}],
    }
    manifest.write(folder / manifest.NAME, manifest.StepSpec(STEP, SETTINGS), outputs, facts, 1.0)
    (folder / "stray.txt").write_text("private notes", encoding="utf-8")


class User:
    """Someone who runs ``python 6_upload.py`` in a folder of their own."""

    def __init__(self, root: Path, place: Path, url: str):
        self.root, self.place, self.url = root, place, url
        self.folder, self.home = place / "export", place / "home"
        self.environment: dict[str, str] = {}

    def run(self, *arguments: str, token: str | None = hub_server.TOKEN, **environment: str) -> Any:
        """Run the step; its token must stand nowhere afterwards."""
        options = typed(output_tokenizer_and_model_dir=self.folder, huggingface_name=NAME)
        (self.place / "convert.yaml").write_text("private: true\n", encoding="utf-8")
        own = {"HF_HUB_DISABLE_XET": "1"} | ({"HF_TOKEN": token} if token else {}) | self.environment | environment
        command = [sys.executable, str(self.root / "6_upload.py"), "--config", "convert.yaml", *options, *arguments]
        done = hub_server.run(command, self.place, self.url, **own)
        assert (token or hub_server.TOKEN) not in done.stdout + done.stderr + " ".join(command)
        kept = [path for path in self.place.rglob("*") if path.is_file() and path != self.home / "token"]
        assert not [path for path in kept if hub_server.TOKEN.encode() in path.read_bytes()]
        return done

    def log_in(self) -> None:
        self.home.mkdir()
        (self.home / "token").write_text(hub_server.TOKEN, encoding="utf-8")


@pytest.fixture
def user(root: Path, tmp_path: Path, hub: Any) -> User:
    user = User(root, tmp_path, hub.url)
    export_folder(user.folder)
    return user


def test_everything_of_the_manifest_arrives_and_nothing_else(user: User, hub: Any) -> None:
    user.log_in()  # a login on this machine serves as well as HF_TOKEN
    first = user.run(token=None)
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
    for name in names[1:3]:  # one in git, one outside it
        repository.files[name] = b"x" * len(sent[name])
    mended = user.run()
    assert mended.returncode == 0 and repository.commits == 2, mended.stderr
    assert {name: repository.files[name] for name in names} == sent


def test_a_dry_run_lists_files_and_bytes_without_network_or_token(user: User, hub: Any) -> None:
    run = user.run("--dry-run", token=None)
    assert run.returncode == 0, run.stderr
    assert "model-00001-of-00002.safetensors" in run.stdout and "9,000 bytes" in run.stdout
    assert "stray" not in run.stdout and 'continue "Ana are"' in run.stdout
    following = shlex.split(run.stdout.splitlines()[-1].removeprefix("next: "))
    assert following[2:4] == ["--config", "convert.yaml"] and f"huggingface_name={NAME}" in following
    unnamed = user.run("--dry-run", "--set", "huggingface_name=''", token=None)
    assert unnamed.returncode == 0 and "9,000 bytes" in unnamed.stdout, unnamed.stderr
    last = unnamed.stdout.splitlines()[-1]
    assert "huggingface_name: user/name into convert.yaml, then python" in last
    assert hub.requests == []


def test_the_card_says_what_the_settings_say_when_it_is_sent(user: User, hub: Any) -> None:
    """The license that is published is never another than the one that the settings name."""
    card = user.folder / "README.md"
    assert user.run("--dry-run", token=None).returncode == 0 and card.read_text(encoding="utf-8") == CARD
    assert user.run().returncode == 0
    assert hub.repositories[NAME].files["README.md"].decode() == card.read_text(encoding="utf-8") == AS_SENT
    assert not exported_folder.to_keep(user.folder).count(card.name), "step 4 may replace what no hand wrote"
    renamed = ["license=cc-by-nc-4.0", "language=[pt, ro]", "huggingface_name=ada/second"]
    again = user.run(*typed(*renamed))
    assert again.returncode == 0 and "names no" not in again.stdout, again.stderr
    sent = hub.repositories["ada/second"].files["README.md"].decode()
    assert ModelCard(sent).data.to_dict() == {"language": ["pt", "ro"], "license": "cc-by-nc-4.0"}
    assert sent.endswith('# second\n\nname = "ada/second"\n')
    card.write_text('---\n{}  # nothing yet\n---\nBy hand.\n\nname = "a" + "\\d"\n', encoding="utf-8")
    edited = user.run()
    assert edited.returncode == 0 and "names no language and no license" in edited.stdout, edited.stderr
    assert hub.repositories[NAME].files["README.md"] == card.read_bytes() and b"# nothing yet" in card.read_bytes()
    assert exported_folder.to_keep(user.folder).count(card.name)


def test_a_license_that_the_hub_does_not_know_is_told_with_a_remedy_that_works(user: User, hub: Any) -> None:
    spelt = user.run("--set", "license=Apache-2.0", "--set", "language=[pt-BR]")
    assert spelt.returncode == 2 and "apache-2.0" in spelt.stderr and "pt-BR" in spelt.stderr and not hub.requests
    unknown = user.run("--set", "license=unheard-of")
    assert unknown.returncode == 2 and "must be one of" in unknown.stderr
    assert "set a language and a license" in unknown.stderr
    assert hub.repositories[NAME].commits == 0
    assert user.run("--set", "license=mit").returncode == 0


def test_a_card_that_was_edited_on_the_hub_is_not_replaced(user: User, hub: Any) -> None:
    assert user.run().returncode == 0
    repository = hub.repositories[NAME]
    repository.files["README.md"], repository.title = b"---\n{}\n---\nOn the Hub.\n", "Update README.md"
    refused = user.run()
    assert refused.returncode == 2 and "Update README.md" in refused.stderr and "--redo" in refused.stderr
    assert b"On the Hub." in repository.files["README.md"]
    replaced = user.run("--redo")
    assert replaced.returncode == 0 and "sent        1 file\n" in replaced.stdout, replaced.stdout + replaced.stderr
    assert repository.files["README.md"].decode() == AS_SENT
    assert user.run("--set", "license=mpl-2.0").returncode == 0, "our own card was there"


def test_a_commit_whose_answer_was_lost_is_found(user: User, hub: Any) -> None:
    hub.lfs_bytes, hub.lose_answers = 1 << 20, 1
    run = user.run(HF_HUB_DISABLE_XET="0")
    assert run.returncode == 0 and hub.repositories[NAME].commits == 1, run.stderr


@pytest.mark.parametrize(
    ("name", "token", "code", "words"),
    [
        (NAME, None, 2, ["hf auth login", "HF_TOKEN"]),
        (NAME, "hf_wrong_one", 1, ["HF_TOKEN"]),
        ("somebody/first", hub_server.TOKEN, 1, ["403", "ada", "team"]),
        ("ada/a--b", hub_server.TOKEN, 2, ["huggingface_name"]),
    ],
)
def test_who_may_not_is_told(user: User, hub: Any, name: str, token: str | None, code: int, words: list[str]) -> None:
    run = user.run("--set", f"huggingface_name={name!r}", token=token)
    assert run.returncode == code and all(word in run.stderr for word in words)
    assert hub.repositories == {} and (code == 1 or hub.requests == [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("switch", "value", "words", "left"),
    [
        ("fail_commit", 500, ["status 500", "the Hub stumbled"], 0),
        ("fail_put_after", 1, ["the storage broke down"], 1),
    ],
)
def test_a_failing_upload_ends_with_1_quotes_no_secret_and_the_next_run_sends_what_is_missing(
    user: User, hub: Any, switch: str, value: int, words: list[str], left: int
) -> None:
    """The server quotes addresses and tokens; the token is known by its form alone."""
    hub.quotes, hub.num_stumbles = True, 1
    setattr(hub, switch, value)
    user.log_in()
    first = user.run(token=None)
    assert first.returncode == 1 and "was the answer to http://127.0.0.1" in first.stderr
    assert "HTTP Error 503" in first.stderr, "a warning of the client, which quotes the signed address"
    assert all(word in first.stderr for word in words)
    assert "X-Amz" not in first.stderr and hub_server.SIGNATURE not in first.stderr
    assert hub.repositories[NAME].commits == 0 and len(hub.storage) == 2 - left
    setattr(hub, switch, None)
    hub.requests.clear()
    second = user.run(token=None)
    assert second.returncode == 0, second.stderr
    assert hub.count("PUT") == left, "the same bytes were sent again"


def test_the_password_of_a_proxy_is_not_told(user: User) -> None:
    proxy = "http://ada:pass%2Fword@127.0.0.1:9"
    run = user.run(HTTP_PROXY=proxy, http_proxy=proxy, ALL_PROXY=proxy, NO_PROXY="", no_proxy="")
    assert run.returncode == 1 and "pass%2Fword" not in run.stderr + run.stdout


@pytest.fixture(params=[False, True], ids=["", "streamed"])
def is_streamed(request: pytest.FixtureRequest, user: User, hub: Any) -> bool:
    """Uploads may go the way of Xet, as they do by default; the server has none, so all files are in git then."""
    if request.param:
        hub.lfs_bytes = 1 << 20
        user.environment = {"HF_HUB_DISABLE_XET": "0"}
    return request.param


@pytest.mark.slow
def test_two_uploads_at_once_never_mix(user: User, hub: Any, is_streamed: bool) -> None:
    hub.repositories[NAME] = hub_server.Repository(private=True)
    hub.awaited_commits = threading.Barrier(2)
    other = User(user.root, user.place / "elsewhere", user.url)
    other.environment = user.environment
    export_folder(other.folder, config='{"other": 1}\n')
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(User.run, (user, other))
    assert sorted((first.returncode, second.returncode)) == [0, 1], first.stderr + second.stderr
    lost, winner = (first, other) if first.returncode else (second, user)
    assert "ada/first" in lost.stderr
    assert hub.repositories[NAME].commits == 1
    assert hub.repositories[NAME].files["config.json"] == (winner.folder / "config.json").read_bytes()


def test_a_listing_that_differs_ends_with_1(user: User, hub: Any) -> None:
    hub.hide_from_listing.add("model-00002-of-00002.safetensors")
    run = user.run()
    assert run.returncode == 1 and "model-00002-of-00002.safetensors: missing" in run.stderr


def test_a_public_repository_is_not_filled_where_private_is_asked(user: User, hub: Any) -> None:
    hub.repositories[NAME] = hub_server.Repository(private=False)
    run = user.run()
    assert run.returncode == 2 and NAME in run.stderr
    assert hub.repositories[NAME].commits == 0 and hub.storage == {}


@pytest.mark.slow
def test_other_files_in_the_repository_stop_it_unless_redo(user: User, hub: Any, is_streamed: bool) -> None:
    hub.repositories[NAME] = hub_server.Repository(private=True)
    hub.repositories[NAME].files["old [1].bin"] = b"old"
    run = user.run()
    assert run.returncode == 2 and "old [1].bin" in run.stderr and "--redo" in run.stderr
    assert hub.repositories[NAME].commits == 0
    run = user.run("--redo")
    assert run.returncode == 0, run.stderr
    assert hub.repositories[NAME].commits == 1
    sent = hub.repositories[NAME].files.keys() - {".gitattributes"}
    assert sent == {path.name for path in user.folder.iterdir()} - {manifest.NAME, "stray.txt"}
    assert is_streamed == ("Found 4 files" in run.stderr), "nothing is told where there is no terminal"


def edit(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda folder: edit(folder / manifest.NAME, '"holds": true', '"holds": false'), [manifest.NAME]),
        (lambda folder: edit(folder / "config.json", "{}", "[]"), ["config.json: "]),
        (lambda folder: (folder / "README.md").unlink(), ["README.md: "]),
        (lambda folder: folder.rename(folder.with_name("moved")), ["export", "step 4"]),
    ],
)
def test_a_folder_that_is_not_what_was_proved_is_not_sent(user: User, hub: Any, harm: Any, words: list[str]) -> None:
    harm(user.folder)
    run = user.run()
    assert run.returncode == 2 and all(word in run.stderr for word in words), run.stderr
    assert hub.requests == []


@pytest.mark.parametrize("quotes", [False, True])
def test_a_refusal_on_the_way_of_xet_is_told_and_its_log_holds_no_token(user: User, hub: Any, quotes: bool) -> None:
    hub.quotes = quotes
    run = user.run(HF_HUB_DISABLE_XET="0")  # the server has no Xet
    assert run.returncode == 1 and "xet" in run.stderr
    assert list(user.home.rglob("*.log")), "Xet writes its log elsewhere now: look there"


def test_offline_mode_a_server_that_is_no_hub_and_none_are_named_within_seconds(user: User, hub: Any) -> None:
    offline = user.run(HF_HUB_OFFLINE="1")
    assert offline.returncode == 1 and "HF_HUB_OFFLINE" in offline.stderr
    user.url = hub.url + "/elsewhere"
    run = user.run()
    assert run.returncode == 1 and "404" in run.stderr
    with socket.socket() as unused:  # bound and not listening: nothing else can take the port
        unused.bind(("127.0.0.1", 0))
        user.url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        started = time.monotonic()
        run = user.run()
    assert run.returncode == 1 and user.url in run.stderr
    assert time.monotonic() - started < 20
