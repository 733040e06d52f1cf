"""A small Hub on loopback that speaks what huggingface_hub 2.4 asks for when a model is uploaded or a dataset is read.

Repositories, files and received requests are plain attributes that a test reads, and faults are switches that it sets.
Spoken: who-am-i, model info, create, validate YAML, pre-upload, LFS batch and PUT, commit (ndjson), tree. Xet is not:
a test sets HF_HUB_DISABLE_XET, as a user behind a proxy may. For datasets: revision, tree in pages, and ranges of
files, those outside git by way of another host ("localhost"), which must never see the token.
"""

import base64
import hashlib
import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

TOKEN = "hf_ASecretThatMustShowUpNowhere0123456"
SIGNATURE = "0a1b2c3d4e5f"
SIGNED = f"X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIAEXAMPLE&X-Amz-Signature={SIGNATURE}"
"""The query of an address at which the storage asks for no token."""
LFS_BYTES = 4096
"""Files of this size and more go outside git here (on the real Hub: 10 MB, or by .gitattributes)."""


def git_blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(path: str, content: bytes, outside_git: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": git_blob(content)}
    if outside_git:
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry


@dataclass
class Repository:
    private: bool
    commits: int = 0
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b"*.safetensors filter=lfs\n"})
    outside_git: set[str] = field(default_factory=set)
    title: str = "initial commit"
    """Of the commit that the card is from."""

    @property
    def sha(self) -> str:
        return hashlib.sha1(b"commit %d" % self.commits).hexdigest()


@dataclass
class Dataset:
    """A dataset of one commit, on the branches ``main`` and ``v1``."""

    files: dict[str, bytes] = field(default_factory=dict)
    private: bool = False
    gated: bool = False
    revisions: tuple[str, ...] = ("main", "v1", "refs/convert/parquet")

    @property
    def sha(self) -> str:
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()


@dataclass
class Hub:
    """The state of the server, and the ways in which it fails."""

    user: str = "ada"
    organisations: tuple[str, ...] = ("team",)
    repositories: dict[str, Repository] = field(default_factory=dict)
    storage: dict[str, bytes] = field(default_factory=dict)
    """Content outside git by SHA-256."""
    datasets: dict[str, Dataset] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    bytes_sent: int = 0
    """Of the files of datasets."""
    url: str = ""
    # switches
    lfs_bytes: int = LFS_BYTES
    """Files of this size and more of a model go outside git."""
    fail_commit: int | None = None
    """Status with which a commit is answered."""
    awaited_commits: threading.Barrier | None = None
    """Holds each commit until all that it waits for have come: uploads that run at once."""
    quotes: bool = False
    """True to quote the address and the token in refusals, as some proxies do."""
    fail_storage: int | None = None
    """Status with which the other host answers when a dataset's file is asked of it."""
    hide_from_listing: set[str] = field(default_factory=set)
    lose_answers: int = 0
    """Number of commits that are made, and answered with status 504."""
    fail_put_after: int | None = None
    """Number of files outside git after which the storage breaks down (status 400, which nobody tries again)."""
    num_stumbles: int = 0
    """Number of files outside git that are answered with status 503, after which a client tries again."""
    drop_at: int | None = None
    """Byte of a dataset's file at which the connection breaks."""
    num_drops: int = 1_000_000
    """Number of times that it still breaks."""
    tree_page: int = 2
    """Files on a page of a dataset's listing."""
    next_page_at: str = ""
    """Another host that the listing of a dataset goes on at."""
    too_often: int = 0
    """Number of requests for a part of a file, but for its first byte, that are answered with status 429."""

    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, beginning: str) -> int:
        return sum(request.startswith(beginning) for request in self.requests)


def run(command: Sequence[str], place: Path, url: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, as someone whose Hub is at `url` and who has no other settings than `environment`."""
    clean = {key: text for key, text in os.environ.items() if not key.startswith(("HF_", "HUGGING_FACE"))}
    clean |= {"HF_ENDPOINT": url, "HF_HOME": str(place / "home"), "NO_PROXY": "127.0.0.1,localhost"}
    done = subprocess.run(command, cwd=place, env=clean | environment, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    return done


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        body = self._body()
        self.hub.requests.append(f"{self.command} {path}")
        if self._is_open(path) is False and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            headers = {"X-Error-Code": "RepoNotFound"} if path.startswith("/api/datasets/") else {}
            return self._answer(401, {"error": "Invalid credentials in Authorization header"}, headers)
        for method, pattern, handler in _ROUTES:
            match = re.fullmatch(pattern, path)
            if method == self.command and match:
                return handler(self, body, *match.groups())
        self._answer(404, {"error": f"no such page {path}"})

    do_POST = do_PUT = do_GET

    def _is_open(self, path: str) -> bool:
        """True where no token is asked for: signed addresses, and public datasets."""
        if path.startswith(("/storage/", "/cdn/")):
            return True
        match = re.match(r"/(?:api/)?datasets/([^/]+/[^/]+)", path)
        found = self.hub.datasets.get(match[1]) if match else None
        return found is not None and not found.private

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, value: object = None, headers: dict[str, str] | None = None) -> None:
        if self.hub.quotes and status >= 400:
            came = f"{self.hub.url}{self.path} (Authorization: {self.headers.get('Authorization')}), {self.path}"
            value = {"error": f"{value} was the answer to {came}, {self.headers.get('Authorization')}"}
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        for key, text in (headers or {}).items():
            self.send_header(key, text)
        self.end_headers()
        self.wfile.write(content)

    def who(self, body: bytes) -> None:
        self._answer(200, {"name": self.hub.user, "orgs": [{"name": name} for name in self.hub.organisations]})

    def info(self, body: bytes, name: str) -> None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        self._answer(200, {"id": name, "private": repository.private, "sha": repository.sha})

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        owner = asked.get("organization") or self.hub.user
        if owner not in (self.hub.user, *self.hub.organisations):
            return self._answer(403, {"error": f"You don't have the rights to create a model under {owner}"})
        name = f"{owner}/{asked['name']}"
        self.hub.repositories[name] = Repository(private=asked.get("visibility") == "private")
        self._answer(200, {"url": f"{self.hub.url}/{name}", "name": name})

    def validate(self, body: bytes) -> None:
        content = json.loads(body)["content"]
        faults = [] if content.startswith("---\n") else [{"message": "no front matter"}]
        faults += [{"message": '"license" must be one of [mit, …]'}] if "license: unheard-of" in content else []
        self._answer(400 if faults else 200, {"errors": faults, "warnings": []})

    def preupload(self, body: bytes, name: str, revision: str) -> None:
        repository, answers = self.hub.repositories[name], []
        for file in json.loads(body)["files"]:
            outside = file["size"] >= self.hub.lfs_bytes
            there = repository.files.get(file["path"])
            oid = None if there is None else hashlib.sha256(there).hexdigest() if outside else git_blob(there)
            mode = "lfs" if outside else "regular"
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._answer(200, {"files": answers})

    def batch(self, body: bytes, name: str) -> None:
        objects = []
        for asked in json.loads(body)["objects"]:
            answer = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.hub.storage:
                href = f"{self.hub.url}/storage/{asked['oid']}?{SIGNED}"
                answer["actions"] = {"upload": {"href": href, "header": {}}}
            objects.append(answer)
        self._answer(200, {"transfer": "basic", "objects": objects})

    def put(self, body: bytes, oid: str) -> None:
        if self.hub.fail_put_after is not None and len(self.hub.storage) >= self.hub.fail_put_after:
            return self._answer(400, {"error": "the storage broke down"})
        if self.hub.num_stumbles:
            self.hub.num_stumbles -= 1
            return self._answer(503)
        if hashlib.sha256(body).hexdigest() != oid:
            return self._answer(400, {"error": "other content"})
        self.hub.storage[oid] = body
        self._answer(200, {})

    def commit(self, body: bytes, name: str, revision: str) -> None:
        if self.hub.fail_commit:
            return self._answer(self.hub.fail_commit, {"error": "the Hub stumbled"})
        if self.hub.awaited_commits:
            self.hub.awaited_commits.wait(60)
        with self.hub.lock:
            self._commit(name, [json.loads(line) for line in body.splitlines()])

    def _commit(self, name: str, operations: list[dict[str, Any]]) -> None:
        repository = self.hub.repositories[name]
        parent = next(each["value"].get("parentCommit") for each in operations if each["key"] == "header")
        if parent not in (None, repository.sha):
            return self._answer(412, {"error": "A commit has happened since. Please refresh and try again."})
        files = dict(repository.files)
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                if value["oid"] not in self.hub.storage:
                    return self._answer(400, {"error": f"{value['path']}: the object was never sent"})
                files[value["path"]] = self.hub.storage[value["oid"]]
                repository.outside_git.add(value["path"])
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
        header = next(each["value"] for each in operations if each["key"] == "header")
        if files.get("README.md") != repository.files.get("README.md"):
            repository.title = header["summary"]
        repository.files, repository.commits = files, repository.commits + 1
        if self.hub.lose_answers:
            self.hub.lose_answers -= 1
            return self._answer(504, {"error": "no answer in time"})
        self._answer(200, {"commitUrl": f"{self.hub.url}/{name}/commit/{repository.sha}", "commitOid": repository.sha})

    def paths_info(self, body: bytes, name: str, revision: str) -> None:
        repository, asked = self.hub.repositories[name], parse_qs(body.decode())
        last = {"id": repository.sha, "title": repository.title, "date": "2026-01-01T00:00:00.000Z"}
        entries = [_entry(path, repository.files[path], False) for path in asked["paths"]]
        self._answer(200, [entry | {"lastCommit": last} for entry in entries])

    def tree(self, body: bytes, name: str, revision: str) -> None:
        repository = self.hub.repositories[name]
        entries = []
        for path, content in sorted(repository.files.items()):
            if path not in self.hub.hide_from_listing:
                entries.append(_entry(path, content, path in repository.outside_git))
        self._answer(200, entries)

    def _dataset(self, name: str, revision: str) -> Dataset | None:
        found = self.hub.datasets.get(name)
        if found is None:
            self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif unquote(revision) not in (*found.revisions, found.sha):
            self._answer(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
            return None
        return found

    def dataset_revision(self, body: bytes, name: str, revision: str) -> None:
        if dataset := self._dataset(name, revision):
            self._answer(200, {"id": name, "private": dataset.private, "sha": dataset.sha})

    def dataset_tree(self, body: bytes, name: str, revision: str, folder: str | None) -> None:
        dataset = self._dataset(name, revision)
        if dataset is None:
            return
        if self.headers.get("Authorization") and self.headers["Host"] not in self.hub.url:
            return self._answer(400, {"error": "the token was sent to another host"})
        asked = {key: values[0] for key, values in parse_qs(self.path.partition("?")[2]).items()}
        inside = f"{unquote(folder)}/" if folder else ""
        below = {path: content for path, content in dataset.files.items() if path.startswith(inside)}
        if not below:
            return self._answer(404, {"error": "no such folder"}, {"X-Error-Code": "EntryNotFound"})
        entries: list[dict[str, Any]] = []
        for path, content in below.items():
            rest = path.removeprefix(inside)
            if "/" in rest and asked["recursive"] != "true":
                path = inside + rest.partition("/")[0]
                entries.append({"type": "directory", "path": path, "oid": "0" * 40, "size": 0})
                continue
            entries.append(_entry(path, content, len(content) >= LFS_BYTES))
        first = int(asked.get("cursor", 0))
        headers = {}
        if first + self.hub.tree_page < len(entries):
            query = f"recursive={asked['recursive']}&cursor={first + self.hub.tree_page}"
            page = f"{self.hub.next_page_at or self.hub.url}{self.path.partition('?')[0]}?{query}"
            headers["Link"] = f'<{page}>; rel="next"'
        self._answer(200, entries[first : first + self.hub.tree_page], headers)

    def dataset_file(self, body: bytes, name: str, revision: str, path: str) -> None:
        dataset = self._dataset(name, revision)
        if dataset is None:
            return
        if dataset.gated and self.headers.get("Authorization") is None:
            return self._answer(401, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
        content = dataset.files[unquote(path)]
        if len(content) >= LFS_BYTES:
            port = self.hub.url.rpartition(":")[2]
            where = f"http://localhost:{port}/cdn/{name}/{path}?{SIGNED}"
            return self._answer(302, None, {"Location": where})
        self._send(content)

    def cdn_file(self, body: bytes, name: str, path: str) -> None:
        if self.headers.get("Authorization"):
            return self._answer(400, {"error": "the token was sent to another host"})
        if self.hub.fail_storage:
            return self._answer(self.hub.fail_storage, {"error": "the address has expired"})
        self._send(self.hub.datasets[name].files[unquote(path)])

    def _send(self, content: bytes) -> None:
        """Send what the header Range asks for, unless the connection is to break on the way."""
        first, last = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"]).groups()  # type: ignore[union-attr]
        start, end = int(first), min(int(last) + 1, len(content))
        if self.hub.too_often and last != "0":
            self.hub.too_often -= 1
            return self._answer(429, {"error": "too many requests"}, {"Retry-After": "1"})
        self.send_response(206)
        self.send_header("Content-Length", str(end - start))
        self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        self.end_headers()
        if self.hub.drop_at is not None and start <= self.hub.drop_at < end and self.hub.num_drops:
            self.hub.num_drops -= 1
            self.wfile.write(content[start : self.hub.drop_at])
            self.close_connection = True
            return
        self.hub.bytes_sent += end - start
        self.wfile.write(content[start:end])


_NAME = r"([^/]+/[^/]+)"
_ROUTES = (
    ("GET", r"/api/whoami-v2", _Handler.who),
    ("GET", rf"/api/models/{_NAME}", _Handler.info),
    ("POST", r"/api/repos/create", _Handler.create),
    ("POST", r"/api/validate-yaml", _Handler.validate),
    ("POST", rf"/api/models/{_NAME}/preupload/([^/]+)", _Handler.preupload),
    ("POST", rf"/{_NAME}\.git/info/lfs/objects/batch", _Handler.batch),
    ("PUT", r"/storage/([0-9a-f]{64})", _Handler.put),
    ("POST", rf"/api/models/{_NAME}/commit/([^/]+)", _Handler.commit),
    ("GET", rf"/api/models/{_NAME}/tree/([^/]+)", _Handler.tree),
    ("POST", rf"/api/models/{_NAME}/paths-info/([^/]+)", _Handler.paths_info),
    ("GET", rf"/api/datasets/{_NAME}/revision/([^/]+)", _Handler.dataset_revision),
    ("GET", rf"/api/datasets/{_NAME}/tree/([^/]+)(?:/(.+))?", _Handler.dataset_tree),
    ("GET", rf"/datasets/{_NAME}/resolve/([^/]+)/(.+)", _Handler.dataset_file),
    ("GET", rf"/cdn/{_NAME}/(.+)", _Handler.cdn_file),
)
