"""Folders and patterns with links, loops, pipes, names of any bytes → each file once, and nothing lost in silence."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from zerokara.corpus.find import find_files
from zerokara.errors import Fault, UserError, shown


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "a"}\n', encoding="utf-8")


def names(folder: Path, *entries: str) -> list[str]:
    return [file.name for file in find_files([str(folder / entry) for entry in entries], "config.yaml:3")]


def fault_of(folder: Path, entry: str) -> Fault:
    with pytest.raises(UserError) as raised:
        names(folder, entry)
    return raised.value.faults[0]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, by relative names."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return Path(".")


@pytest.mark.parametrize("entry", ["in", "in/**", "in/**/*.jsonl"])
def test_links_are_followed(here: Path, entry: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(here, "in/b.jsonl", "far/deep/c.jsonl", "far/d.jsonl", "alone/z.jsonl")
    (here / "in/a_linked").symlink_to("../far")
    (here / "in/a.jsonl").symlink_to("../alone/z.jsonl")
    assert names(here, entry) == ["in/a.jsonl", "in/a_linked/d.jsonl", "in/a_linked/deep/c.jsonl", "in/b.jsonl"]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("entry", ["in", "in/**", "in/**/*.jsonl", "in/*"])
def test_a_file_has_its_own_name_however_many_links_lead_to_it(
    here: Path, entry: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here, "in/m.jsonl", "in/sub/n.jsonl")
    (here / "in/a.jsonl").symlink_to("m.jsonl")
    (here / "in/b.jsonl").symlink_to("sub/n.jsonl")
    (here / "in/first").symlink_to("sub")
    assert names(here, entry) == ["in/m.jsonl", "in/sub/n.jsonl"]
    assert "note: in/a.jsonl and " in capsys.readouterr().out


@pytest.mark.parametrize("entry", ["in", "in/**", "in/**/*.jsonl"])
def test_loops_of_links_end(here: Path, entry: str) -> None:
    write(here, "in/a.jsonl", "in/sub/b.jsonl", "other/c.jsonl")
    for link, target in {
        "in/x": ".",
        "in/y": "../in",
        "in/sub/z": "..",
        "in/o": "../other",
        "other/i": "../in",
    }.items():
        (here / link).symlink_to(target)
    assert names(here, entry) == ["in/a.jsonl", "in/o/c.jsonl", "in/sub/b.jsonl"]


def test_the_same_file_by_two_entries_stays_a_fault(here: Path) -> None:
    write(here, "in/a.jsonl", "in/b.jsonl")
    (here / "again").symlink_to("in")
    with pytest.raises(UserError) as raised:
        names(here, "in", "again")
    (fault,) = raised.value.faults
    assert (fault.where, fault.value) == ("config.yaml:3", "again")
    assert "again/a.jsonl and 1 more" in fault.rule and " in " in fault.rule


@pytest.mark.parametrize("entry", ["in", "in/*", "in/**", "in/gone.jsonl"])
def test_a_link_to_nothing_with_a_corpus_file_s_name_is_a_fault(here: Path, entry: str) -> None:
    write(here, "in/a.jsonl")
    (here / "in/gone.jsonl").symlink_to("/nowhere/b.jsonl")
    fault = fault_of(here, entry)
    assert (fault.where, fault.value) == ("config.yaml:3", "in/gone.jsonl") and "link" in fault.rule


def test_other_links_to_nothing_are_told_where_they_may_have_been_a_folder(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here, "in/a.jsonl")
    for link in ("part2", ".lock", "README.md"):
        (here / "in" / link).symlink_to("gone")
    (here / "in/round").symlink_to("round")
    assert names(here, "in") == ["in/a.jsonl"]
    assert "note: in/part2 and 1 more: a link to nothing" in capsys.readouterr().out


def test_pipes_and_sockets_are_not_opened(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here, "in/a.jsonl")
    os.mkfifo(here / "in/pipe.txt")
    (here / "in/linked.txt").symlink_to("pipe.txt")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("in/socket.txt")
    for entry in ("in", "in/**/*"):
        assert names(here, entry) == ["in/a.jsonl"]
        assert "note: in/linked.txt and 2 more: a pipe, a socket or a device; left out\n" in capsys.readouterr().out
    fault = fault_of(here, "in/pipe.txt")
    assert fault.value == "in/pipe.txt" and "pipe" in fault.rule and fault.remedy


@pytest.fixture
def nobody(here: Path) -> Iterator[None]:
    """Not being root, to whom nothing is closed."""
    if os.geteuid():
        yield
        return
    os.chown(here, 65534, 65534)
    os.setresuid(65534, 65534, 0)
    yield
    os.setresuid(0, 0, 0)


@pytest.mark.usefixtures("nobody")
def test_what_may_not_be_read_is_told_before_anything_is_done(here: Path) -> None:
    write(here, "in/a.jsonl", "in/closed.jsonl", "in/sub/b.jsonl")
    (here / "in/closed.jsonl").chmod(0)
    assert fault_of(here, "in").where == "in/closed.jsonl"
    (here / "in/sub").chmod(0)
    for entry in ("in", "in/**/*.jsonl"):
        fault = fault_of(here, entry)
        assert str(fault.value).rstrip("/") == "in/sub" and "Permission denied" in fault.rule
    (here / "in/sub").chmod(0o700)


def test_files_in_the_making_are_no_corpus(here: Path) -> None:
    write(here, "data/a.jsonl", "data/tokens_tokenizing.partial/0000000-000000000000000.json")
    for entry in ("data", "data/**", "data/**/*.json*"):
        assert names(here, entry) == ["data/a.jsonl"]
    assert fault_of(here, "data/*/*.json").value == "data/*/*.json"


NAMES = {
    os.fsdecode(b"caf\xe9.txt"): r"caf\xe9.txt",
    "café.txt": "café.txt",
    r"caf\xe9.txt": r"caf\\xe9.txt",
    "two\nlines.txt": r"two\u000alines.txt",
    "\x1b[31mred.txt": r"\u001b[31mred.txt",
    "\x85.txt": r"\u0085.txt",
    "\u202etxt.a.txt": r"\u202etxt.a.txt",
    "日本\u3000語 #[x].txt": "日本\u3000語 #[x].txt",
    "-rf.txt": "-rf.txt",
}


def test_every_name_is_shown_without_harm_or_loss(here: Path) -> None:
    for name in NAMES:
        write(here, f"in/{name}")
    files = find_files(["in"], "")
    assert {file.path.name: file.name for file in files} == {name: f"in/{spelt}" for name, spelt in NAMES.items()}
    assert len({file.name for file in files}) == len(NAMES)
    for name, spelt in NAMES.items():
        assert shown(name).encode() == spelt.encode()
        if "\udce9" not in name:
            assert [file.name for file in find_files([f"in/{name}"], "")] == [f"in/{spelt}"]


def test_no_such_user(here: Path) -> None:
    assert fault_of(here, "~nobody_of_this_name/a.txt").value == "~nobody_of_this_name/a.txt"


def test_text_that_is_packed_in_another_way_is_not_passed_over_in_silence(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here, "in/a.jsonl", "in/b.jsonl.xz", "in/c.TXT.BZ2", "in/notes.md.xz", "in/.d.txt.xz", "in/e.py")
    assert names(here, "in") == ["in/a.jsonl"]
    told = capsys.readouterr().out
    assert told.startswith("note: in/") and told.endswith(
        " and 1 more: of a format not known here; left out; compress it as .gz or .zst\n"
    )


@pytest.mark.parametrize("entry", ["", " "])
def test_an_empty_entry_is_not_this_folder(here: Path, entry: str) -> None:
    write(here, "a.jsonl")
    with pytest.raises(UserError) as raised:
        find_files([entry], "config.yaml:3")
    (fault,) = raised.value.faults
    assert fault.where == "config.yaml:3" and "empty" in fault.rule
    assert names(here, ".") == ["a.jsonl"]
