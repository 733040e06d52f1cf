"""Errors, durable files, manifests, progress."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zerokara import hashing, manifest, progress
from zerokara.durable import appearing_file, appearing_folder, write_text
from zerokara.errors import Fault, RunError, UserError, redacted, shown
from zerokara.steps import command


def test_fault_reads_as_one_line() -> None:
    fault = Fault(where="config.yaml:14", key="lr", found=-1, rule="must be greater than 0", remedy="try 3e-4")
    assert str(fault) == "config.yaml:14: lr = -1: must be greater than 0; try 3e-4"
    assert str(Fault(where="a.bin", rule="is cut off")) == "a.bin: is cut off"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("at https://s3.eu/b/o?X-Amz-Signature=ab12&x=1: gone", "at https://s3.eu/b/o?…: gone"),
        ("(https://s3.eu/b/o?X-Amz-Signature=ab12); again", "(https://s3.eu/b/o?…); again"),
        ("'https://cdn.hub/f#token' and \"hf://a/b?c\"", "'https://cdn.hub/f?…' and \"hf://a/b?…\""),
        ("with url: /b/o?Signature=ab%2F12&Key-Pair-Id=k (Caused", "with url: /b/o?… (Caused"),
        ("X-Amz-Credential=AKIA%2F1&amp;X-Amz-Signature=ab12\nhost", "…\nhost"),
        ("<b>x</b><SignatureProvided>a\nb</SignatureProvided>", "<b>x</b><SignatureProvided>…</SignatureProvided>"),
        ("ProxyError: http://ada:p@ss@proxy:8080/", "ProxyError: http://…@proxy:8080/"),
        ("socks5://ada:secret@proxy", "socks5://…@proxy"),
        ("token hf_abcdefghijABCDEFGHIJ0123456789wxyz.", "token hf_…."),
        ("hf_oauth_abcdefghijABCDEFGHIJ0123456789", "hf_…"),
        ("headers {'authorization': 'Bearer abc.def', 'host': 'x'}", "headers {'authorization': '…', 'host': 'x'}"),
        ("Authorization: Basic YWRhOnNlY3JldA==\nHost: x", "Authorization: …\nHost: x"),
        ("sent Bearer abcdefgh1234", "sent Bearer …"),
        ("jwt eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln", "jwt …"),
        ("key wandb_v1_" + "a" * 40, "key wandb_v1_…"),
    ],
)  # fmt: skip
def test_what_opens_doors_is_cut_out(text: str, expected: str) -> None:
    assert redacted(text) == expected
    assert redacted(expected) == expected
    assert str(RunError(text)) == str(UserError(text)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "config.yaml:3: input_jsonl = data/[a-z]?*.jsonl: names no file; is it right? see https://hub.co/a/b/settings",
        "hf://datasets/ada/poems@main/data/*.jsonl: hf_raise_for_status, commit 0123456789abcdef0123456789abcdef",
        "lr = -1: must be greater than 0; try 3e-4, or set lr: 1e-3 & min_lr: 0 (a basic understanding helps)",
    ],
)
def test_what_opens_none_stays(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.parametrize(
    "part", ["a+", "?a=).", "<CanonicalRequest>", "a://", "x-amz-", "eyJa-", "&", "http://a@", "cookie ", "hf_", ":"]
)
def test_no_text_keeps_the_expressions_busy(part: str) -> None:
    started = time.process_time()
    redacted(part * (200_000 // len(part)) + "x")
    assert time.process_time() - started < 1


def test_secrets_of_the_environment_are_known_by_the_names_of_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.setenv("MIRROR_PASSWORD", "correct horse")
    monkeypatch.setenv("SOME_TOKEN", "1")
    assert redacted(f"key {'0123456789' * 4}, correct horse, 1") == "key …, …, 1"


def test_a_traceback_holds_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        try:
            raise ValueError("https://ada:secret@hub/f?X-Amz-Signature=ab12")
        except ValueError as error:
            raise KeyError("hf_abcdefghijABCDEFGHIJ0123456789") from error

    assert command.guarded(broken) == 1
    told = capsys.readouterr().err
    assert "ValueError: https://…@hub/f?…" in told and "KeyError: 'hf_…'" in told and "in broken" in told


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    write_text(path, "old")
    with pytest.raises(ValueError, match="stop"), appearing_file(path) as file:
        file.write(b"half")
        raise ValueError("stop")
    assert path.read_text(encoding="utf-8") == "old"
    assert [p.name for p in path.parent.iterdir()] == ["file.txt"]


def test_a_folder_appears_whole_and_replaces(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with appearing_folder(target) as partial:
        (partial / "a").write_text("1", encoding="utf-8")
        assert not target.exists()
    with pytest.raises(ValueError, match="stop"), appearing_folder(target) as partial:
        (partial / "b").write_text("2", encoding="utf-8")
        raise ValueError("stop")
    assert [p.name for p in target.iterdir()] == ["a"]
    with appearing_folder(target) as partial:
        (partial / "c").write_text("3", encoding="utf-8")
    assert [p.name for p in target.iterdir()] == ["c"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.fixture
def done(tmp_path: Path) -> tuple[Path, manifest.Work]:
    source, output = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("in", encoding="utf-8")
    output.write_text("out", encoding="utf-8")
    work = manifest.Work("step", {"size": 3, "list": ("a",)}, {"source": source})
    manifest.finish(tmp_path / "manifest.json", work, {"result": output}, {"tokens": 7}, 1.0)
    return tmp_path, work


def test_same_work_is_done_already_wherever_its_input_lies(done: tuple[Path, manifest.Work]) -> None:
    folder, work = done
    found = manifest.already_done(folder / "manifest.json", work)
    assert found is not None and found.facts == {"tokens": 7}
    moved = folder / "elsewhere.txt"
    (folder / "in.txt").rename(moved)
    assert manifest.already_done(folder / "manifest.json", manifest.Work(work.step, work.settings, {"source": moved}))


def test_other_work_is_refused_naming_each_difference(done: tuple[Path, manifest.Work]) -> None:
    folder, work = done
    (folder / "in.txt").write_text("changed", encoding="utf-8")
    other = manifest.Work("step", {**work.settings, "size": 4}, work.inputs)
    with pytest.raises(UserError, match=r"size was 3, is now 4; source changed \(2 bytes.*7 bytes.*--redo"):
        manifest.already_done(folder / "manifest.json", other)
    assert manifest.already_done(folder / "manifest.json", other, redo=True) is None


def test_a_missing_or_changed_output_is_to_do(done: tuple[Path, manifest.Work]) -> None:
    folder, work = done
    (folder / "out.txt").write_text("tuo", encoding="utf-8")
    assert manifest.already_done(folder / "manifest.json", work) is None
    (folder / "out.txt").unlink()
    assert manifest.already_done(folder / "manifest.json", work) is None


def test_many_inputs_are_hashed_by_threads_and_known_ones_not_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / f"{number}.txt" for number in range(40)]
    for number, path in enumerate(paths):
        path.write_bytes(b"%d" % number * (number * 10_000))
    hashed: list[Path] = []
    counted = hashing._counted_sha256
    monkeypatch.setattr(hashing, "_counted_sha256", lambda path, counter: hashed.append(path) or counted(path, counter))
    work = manifest.Work("step", {}, {"corpus": [*paths, paths[3]]})
    made = manifest.finish(tmp_path / "manifest.json", work, {}, {}, 1.0)
    assert [record.sha256 for record in made.inputs["corpus"][:40]] == [hashing.sha256_of(path) for path in paths]
    assert made.inputs["corpus"][40] == made.inputs["corpus"][3] and len(hashed) == 40
    paths[7].write_bytes(b"other")
    with pytest.raises(UserError, match="corpus changed"):
        manifest.already_done(tmp_path / "manifest.json", work)
    assert hashed[40:] == [paths[7]]


def test_hashing_that_takes_long_shows_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(b"x" * 3_000_000)
    work = manifest.Work("step", {}, {"corpus": path})
    manifest.finish(tmp_path / "manifest.json", work, {}, {}, 1.0)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(hashing, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(progress, "LINE_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(hashing, "_PIECE_BYTES", 50_000)
    add = hashing._Counter.add
    monkeypatch.setattr(hashing._Counter, "add", lambda counter, count: (time.sleep(0.002), add(counter, count)))
    manifest.finish(tmp_path / "manifest.json", work, {}, {}, 1.0)
    assert "checking the input: 3.0 MB of 3.0 MB (100%)" in capsys.readouterr().err


def test_an_input_that_cannot_be_read_stops_the_hashing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / f"{number}.txt" for number in range(9)]
    for path in paths:
        path.write_bytes(b"x")
    monkeypatch.setattr(hashing, "_counted_sha256", _broken_hash)
    with pytest.raises(OSError, match="Input/output error"):
        manifest.finish(tmp_path / "manifest.json", manifest.Work("step", {}, {"corpus": paths}), {}, {}, 1.0)


def _broken_hash(path: Path, counter: object) -> str:
    raise OSError(5, "Input/output error", str(path))


def test_what_lies_on_the_hub_is_known_by_its_content_id(tmp_path: Path) -> None:
    def work(content: str, name: str = "hf://datasets/o/n@c/f.jsonl") -> manifest.Work:
        return manifest.Work("step", {}, {"corpus": [manifest.RemoteFile(name, 7, content)]})

    made = manifest.finish(tmp_path / "manifest.json", work("git:abc"), {}, {}, 1.0)
    assert made.inputs["corpus"] == [manifest.FileRecord("hf://datasets/o/n@c/f.jsonl", 7, "git:abc", 0)]
    assert manifest.already_done(tmp_path / "manifest.json", work("git:abc", "hf://datasets/o/n@d/g.jsonl")) is not None
    with pytest.raises(UserError, match="corpus changed"):
        manifest.already_done(tmp_path / "manifest.json", work("git:abd"))


def test_what_differs_is_told_by_the_names_of_the_yaml(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one")
    work = manifest.Work("x", {"steps": 1}, {"tokenizer": tmp_path / "a"})
    manifest.finish(tmp_path / "m.json", work, {}, {}, 0.0)
    (tmp_path / "a").write_bytes(b"three")
    keys = {"steps": "max_steps", "tokenizer": "input_tokenizer_file"}
    other = manifest.Work("x", {"steps": 2}, {"tokenizer": tmp_path / "a"}, keys.__getitem__)
    with pytest.raises(UserError, match="something else: max_steps was 1, is now 2; input_tokenizer_file changed "):
        manifest.already_done(tmp_path / "m.json", other)


def test_a_manifest_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="is not a manifest"):
        manifest.read(tmp_path / "manifest.json")
    with pytest.raises(UserError, match="there is no manifest here"):
        manifest.read(tmp_path / "other.json")


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    def raising(error: BaseException) -> int:
        def work() -> None:
            raise error

        return command.guarded(work)

    assert raising(UserError([Fault(where="a", rule="one"), Fault(where="b", rule="two")])) == 2
    assert raising(RunError("broke")) == 1
    assert raising(KeyboardInterrupt()) == 130
    assert command.guarded(lambda: None) == 0
    assert capsys.readouterr().err.splitlines()[:3] == ["error: a: one", "error: b: two", "failed: broke"]


def test_plain_progress_lines_tell_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    with progress.Progress("encoding", total=4_000_000, unit="B", stream=stream) as bar:
        bar.note(docs=3)
        bar.advance(1_000_000)
    assert stream.getvalue().startswith("encoding: 1.0 MB of 4.0 MB (25%), ")
    assert "left" in stream.getvalue() and "docs 3" in stream.getvalue()


def test_an_estimated_total_is_never_passed_and_each_phase_has_its_own_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    monkeypatch.setattr(progress, "LINE_INTERVAL_SECONDS", 0.0)
    stream = io.StringIO()
    with progress.Progress("training", total=10, unit="round", stream=stream) as bar:
        now = 100.0
        bar.advance(5)
        assert "100.0 s left" in stream.getvalue() or "1 min 40 s left" in stream.getvalue()
        bar.phase("pruning")
        assert "left" not in stream.getvalue().splitlines()[-1], "nothing of this phase is done yet"
        now = 102.0
        bar.advance(2)
        assert "7 of 10 (70%), 3.0 s left" in stream.getvalue().splitlines()[-1]
        bar.advance(4)
        last = stream.getvalue().splitlines()[-1]
        assert "11 of 11 (100%)" in last and "left" not in last


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (progress.plural(1, "process", "processes"), "1 process"),
        (progress.plural(2400, "process", "processes"), "2,400 processes"),
        (progress.plural(0, "file"), "0 files"),
        (progress.bytes_text(999), "999 B"),
        (progress.bytes_text(12_345_678), "12.3 MB"),
        (progress.count_text(12_345), "12.3k"),
        (progress.count_text(1_230_000_000), "1.23B"),
        (progress.seconds_text(4.21), "4.2 s"),
        (progress.seconds_text(200), "3 min 20 s"),
        (progress.seconds_text(18_720), "5 h 12 min"),
        (progress.seconds_text(180_000), "2 d 2 h"),
        (progress.seconds_text(float("inf")), "?"),
    ],
)
def test_units(text: str, expected: str) -> None:
    assert text == expected


def test_hashes_found_ahead_are_those_of_the_files(tmp_path: Path) -> None:
    for name, content in (("a", b"one"), ("b", b"two" * 1000)):
        (tmp_path / name).write_bytes(content)
    work = manifest.Work("x", {}, {"input": [tmp_path / "a", tmp_path / "b"]})
    with hashing.HashesAhead(work.input_files()) as ahead:
        found = ahead.result()
        made = manifest.finish(tmp_path / "m.json", work, {}, {}, 0.0, ahead=ahead)
    expected = [hashlib.sha256(content).hexdigest() for content in (b"one", b"two" * 1000)]
    assert [record.sha256 for record in made.inputs["input"]] == expected
    assert sorted(found.values()) == sorted(expected)


def test_a_file_that_changed_after_its_hash_is_hashed_again(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one")
    work = manifest.Work("x", {}, {"input": tmp_path / "a"})
    with hashing.HashesAhead(work.input_files()) as ahead:
        ahead.result()
        (tmp_path / "a").write_bytes(b"three")
        made = manifest.finish(tmp_path / "m.json", work, {}, {}, 0.0, ahead=ahead)
    assert made.inputs["input"][0].sha256 == hashlib.sha256(b"three").hexdigest()


def test_an_error_of_the_system_about_a_file_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    def gone() -> None:
        raise FileNotFoundError(2, "No such file or directory", "corpus/a.jsonl")

    assert command.guarded(gone) == 1
    assert capsys.readouterr().err == "failed: cannot read or write corpus/a.jsonl: No such file or directory\n"

    def ours() -> None:
        raise OSError("something that names no file")

    assert command.guarded(ours) == 1
    told = capsys.readouterr().err
    assert told.startswith("Traceback") and told.endswith("OSError: something that names no file\n")


def test_a_terminal_obeys_no_name_or_text_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\x1b]0;pwned\x07\x1b[2J\r\x9b31m\udcff.jsonl\tx"

    def unreadable() -> None:
        raise PermissionError(13, "Permission denied", name)

    def wrong() -> None:
        raise UserError(Fault(where="config.yaml:3", found=name, rule="is of no format known here"))

    assert (command.guarded(unreadable), command.guarded(wrong)) == (1, 2)
    progress.log(name)
    progress.opening(name)
    progress.summary("step 2: done", [(name, name)])
    told = "".join(capsys.readouterr())
    assert told.count("a\\x1b]0;pwned\\x07\\x1b[2J\\r\\x9b31m\\udcff.jsonl\tx") == 5
    assert f"cannot read or write {shown(name)}: " in told
    assert not set("\x1b\x07\r\x9b\udcff") & set(told)


@pytest.mark.parametrize(("words", "code"), [(1, 0), (100_000, 141)])
def test_a_reader_that_leaves_is_no_traceback(words: int, code: int) -> None:
    """As in ``bash 2_tokenize.sh | head -1``: what is done is done, what is not done stops."""
    program = f"from zerokara.steps import command; raise SystemExit(command.guarded(lambda: print('word ' * {words})))"
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**os.environ, "PYTHONPATH": str(Path(command.__file__).parents[2]), "PYTHONUNBUFFERED": ""}
    command_line = [sys.executable, "-c", program]
    done = subprocess.run(command_line, env=environment, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    told = done.stderr.splitlines()
    assert (done.returncode, len(told)) == (code, 0 if code == 0 else 1), told
