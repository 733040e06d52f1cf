"""Entries of the configuration → corpus files: each once, in a fixed order, and nothing lost in silence."""

import os
import pickle
import socket
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from configs import fault_of, refused
from corpus_files import compressed
from programs import run_program

from zerokara.base.errors import RunError, shown
from zerokara.corpus.find import CORPUS, check_unchanged, find_files, note_tests


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return Path(".")


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "a"}\n', encoding="utf-8")


def names(*entries: str) -> list[str]:
    return [file.name for file in find_files(entries, "config.yaml:3")]


def by_source(*entries: str) -> list[tuple[int, str]]:
    return [(file.source, file.name) for file in find_files(entries, "config.yaml:3")]


def test_a_folder_gives_its_corpus_files_sorted_and_below(here: Path) -> None:
    write(here, "b.jsonl", "a.txt", "sub/c.JSON.gz", "notes.md", ".hidden.txt")
    write(here, "ja_quarantine.jsonl", "ja_text_document.manifest.json", "b.txt.partial")
    assert names(".") == ["a.txt", "b.jsonl", "sub/c.JSON.gz"] and names("*.json*") == ["b.jsonl"]


def test_what_a_step_writes_is_not_found_in_a_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By whatever name; but what an entry spells out is, so that the step can refuse it."""
    write(here, "a.jsonl", "x_train_examples.jsonl", "out/text/0.jsonl", "deep/b.jsonl")
    (here / "link").symlink_to("out")
    outputs = [Path("x_train_examples.jsonl").absolute(), Path("out/text")]

    def left(*entries: str) -> list[str]:
        return [file.name for file in find_files(entries, "", outputs=outputs)]

    assert left(".") == ["a.jsonl", "deep/b.jsonl"] and left("*.jsonl") == ["a.jsonl"]
    assert "out/text, x_train_examples.jsonl: left out, written by this step" in capsys.readouterr().out
    assert left("x_train_examples.jsonl", "out/text") == ["x_train_examples.jsonl", "out/text/0.jsonl"]


def test_files_for_tests_beside_training_files_are_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def note_of(*entries: str) -> str:
        note_tests(find_files(entries, ""))
        return capsys.readouterr().out

    write(
        here, "a/train-0.jsonl", "a/test-0.jsonl", "a/val.jsonl", "a/contest.jsonl", "b/train/0.jsonl", "b/test/0.jsonl"
    )
    assert "note: a/test-0.jsonl and 1 more: read as well" in note_of("a")
    assert "note: a/val.jsonl: read as well" in note_of("a/train-0.jsonl", "a/val.jsonl", "a/contest.jsonl")
    assert "note: b/test/0.jsonl: read as well" in note_of("b")
    write(here, "c/train_dev.jsonl", "c/train.jsonl")
    assert not any(map(note_of, ("c", "a/test-0.jsonl", "a/train-0.jsonl", "b/test")))


@pytest.mark.parametrize(
    ("name", "kind", "compression"),
    [
        ("a.jsonl", "jsonl", "none"),
        ("b.JSONL.ZST", "jsonl", "zstd"),
        ("c.json", "jsonl", "none"),
        ("v1.2.ndjson", "jsonl", "none"),
        ("e.txt.gz", "txt", "gzip"),
        ("e.old.txt.zst", "txt", "zstd"),
        ("train-00000-of-00001.parquet", "parquet", "none"),
    ],
)
def test_formats_come_from_names(here: Path, name: str, kind: str, compression: str) -> None:
    write(here, name)
    (file,) = find_files(["."], "")
    assert (file.format, file.compression, file.is_compressed) == (kind, compression, compression != "none")
    assert file.name == name and pickle.loads(pickle.dumps(file)) == file


def test_each_entry_is_a_source_and_globs_expand(here: Path) -> None:
    write(here, "y/a.gz", "y/txt", "y/a.parquet.gz", "y/a.csv", "y/a.txt.gz.bak", "y/README")
    write(here, "x1.jsonl", "x2.jsonl", "y/one.txt", "y/deep/two.txt", "exact[1].txt")
    expected = [(0, "y/deep/two.txt"), (0, "y/one.txt"), (1, "x1.jsonl"), (1, "x2.jsonl")]
    assert by_source("y", "x*.jsonl") == expected
    assert names("exact[1].txt") == ["exact[1].txt"]
    assert names("**/two.txt") == names("y/**/deep") == names("./**/d*/*.txt") == ["y/deep/two.txt"]
    assert names("**/x?.jsonl", "y/**/*.txt") == ["x1.jsonl", "x2.jsonl", "y/deep/two.txt", "y/one.txt"]
    assert "more than once" in fault_of(names, "**/y/**/*.txt").rule


def test_every_entry_without_a_file_is_named_with_what_was_looked_for(here: Path, tmp_path: Path) -> None:
    write(here, "corpus.jsonl", "a.docx")
    (here / "empty").mkdir()
    entries = ["korpus.jsonl", "nowhere/*.txt", "empty", "a.docx", "~nobody_of_this_name/a.txt", " "]
    missing, pattern, empty, other, no_user, blank = faults = refused(names, *entries)
    assert {fault.where for fault in faults} == {"config.yaml:3"}
    assert [fault.value for fault in faults[:-1]] == entries[:-1] and "empty" in blank.rule
    assert "no such" in missing.rule and missing.remedy == "the nearest name is corpus.jsonl"
    assert "no such" in pattern.rule and f"{tmp_path}/here holds a.docx, corpus.jsonl, empty" in pattern.remedy
    assert ".jsonl" in empty.rule and "is empty" in empty.remedy and ".jsonl" in other.rule and no_user.rule
    embedded = fault_of(names, "data/embedded/corpus.jsonl").remedy
    assert embedded.endswith(".venv/bin/python -m zerokara.corpus.embedded data/embedded/corpus.jsonl")
    (here / "a.jsonl").touch()
    assert "0 bytes" in fault_of(names, "a.jsonl").rule


def test_brackets_in_the_name_of_a_folder_are_no_pattern(here: Path) -> None:
    write(here, "a b [c]/x.jsonl", "a b [c]/sub/y.jsonl", "a b c/z.jsonl")
    for entry in ("a b [c]/*.jsonl", f"{here}/a b [c]/*.jsonl"):
        assert [Path(name).name for _, name in by_source(entry)] == ["x.jsonl"]
    assert [Path(name).name for _, name in by_source("a b [c]/**/*.jsonl")] == ["y.jsonl", "x.jsonl"]
    assert [Path(name).name for _, name in by_source("a [b] [c]/*.jsonl")] == ["z.jsonl"]


def test_a_file_named_twice_is_a_fault(here: Path) -> None:
    write(here, "in/a.jsonl", "in/b.jsonl")
    (here / "again").symlink_to("in")
    for second, first_name in (("in/a.jsonl", "in/a.jsonl"), ("again", "again/a.jsonl and 1 more")):
        fault = fault_of(names, "in/*", second)
        assert (fault.where, fault.value) == ("config.yaml:3", second)
        assert first_name in fault.rule and " in/* " in fault.rule


def test_a_list_names_entries_that_form_one_source(here: Path, tmp_path: Path) -> None:
    write(here, "data/x1.jsonl", "data/x2.jsonl", "data/y/one.txt", "data/y/deep/two.txt.zst", "far/z.parquet")
    lines = ["# first the second", "x2.jsonl", "", "  y  ", f"{tmp_path}/here/far/*.parquet", "../far/../data/x1.*"]
    (here / "data/list.txt").write_text("\r\n".join(lines), encoding="utf-8-sig")
    write(here, "last.txt")
    files = [(source, Path(name).name) for source, name in by_source("@data/list.txt", "last.txt")]
    expected = ["x2.jsonl", "two.txt.zst", "one.txt", "z.parquet", "x1.jsonl"]
    assert files == [*((0, name) for name in expected), (1, "last.txt")]


def test_faults_in_a_list_are_told_with_their_lines(here: Path) -> None:
    write(here, "a.jsonl")
    (here / "bad.txt").write_text("a.jsonl\n# more\nb.jsonl\n@other.txt\n", encoding="utf-8")
    (here / "none.txt").write_text("# nothing yet\n\n", encoding="utf-8")
    (here / "latin.txt").write_bytes(b"caf\xe9.txt\n")
    entries = [f"@{name}.txt" for name in ("bad", "none", "latin", "gone")]
    second_file, nested, empty, latin, gone = refused(names, *entries)
    assert (second_file.where, second_file.value) == ("bad.txt:3", "./b.jsonl")
    assert (nested.where, nested.value) == ("bad.txt:4", "@other.txt")
    assert [fault.value for fault in (empty, latin, gone)] == entries[1:]
    assert "UTF-8" in latin.rule and "No such file" in gone.rule and "none.txt" in gone.remedy


def test_a_change_is_told(here: Path) -> None:
    write(here, "a.jsonl")
    files = find_files(["."], "")
    check_unchanged(files)
    with open("a.jsonl", "a", encoding="utf-8") as opened:
        opened.write("more")
    with pytest.raises(RunError, match="it had 14 bytes, now 18"):
        check_unchanged(files)


def test_local_files_need_neither_fsspec_nor_pyarrow(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl")
    compressed(tmp_path / "a.jsonl.gz", b'{"text": "a"}\n')
    program = (
        "import sys; from zerokara.corpus import format_check, find, read\n"
        "files = find.find_files(sys.argv[1:], '')\n"
        "format_check.check_formats(files, 'text', 'line', '')\n"
        "assert sum(1 for part in read.ranges(files, 5) for _ in read.read(part)) == 2\n"
        "heavy = {'huggingface_hub', 'pyarrow', 'pydantic', 'torch', 'numpy', 'backports', 'fsspec'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    assert run_program(program, tmp_path).stdout == "[]\n"


@pytest.mark.parametrize("entry", ["in", "in/**", "in/**/*.jsonl"])
def test_links_are_followed(here: Path, entry: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(here, "in/b.jsonl", "far/deep/c.jsonl", "far/d.jsonl", "alone/z.jsonl")
    (here / "in/a_linked").symlink_to("../far")
    (here / "in/a.jsonl").symlink_to("../alone/z.jsonl")
    assert names(entry) == ["in/a.jsonl", "in/a_linked/d.jsonl", "in/a_linked/deep/c.jsonl", "in/b.jsonl"]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("entry", ["in", "in/**", "in/**/*.jsonl", "in/*"])
def test_a_file_keeps_its_name_whatever_links_to_it(here: Path, entry: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(here, "in/m.jsonl", "in/sub/n.jsonl")
    (here / "in/a.jsonl").symlink_to("m.jsonl")
    (here / "in/b.jsonl").symlink_to("sub/n.jsonl")
    (here / "in/first").symlink_to("sub")
    assert names(entry) == ["in/m.jsonl", "in/sub/n.jsonl"]
    assert "note: in/a.jsonl, in/b.jsonl, in/first" in capsys.readouterr().out


@pytest.mark.parametrize("entry", ["in", "in/**", "in/**/*.jsonl"])
def test_loops_of_links_end(here: Path, entry: str) -> None:
    write(here, "in/a.jsonl", "in/sub/b.jsonl", "other/c.jsonl")
    links = {"in/x": ".", "in/y": "../in", "in/sub/z": "..", "in/o": "../other", "other/i": "../in"}
    for link, target in links.items():
        (here / link).symlink_to(target)
    assert names(entry) == ["in/a.jsonl", "in/o/c.jsonl", "in/sub/b.jsonl"]


@pytest.mark.parametrize("entry", ["in", "in/*", "in/**", "in/gone.jsonl"])
def test_a_link_to_nothing_with_a_corpus_file_s_name_is_a_fault(here: Path, entry: str) -> None:
    write(here, "in/a.jsonl")
    (here / "in/gone.jsonl").symlink_to("/nowhere/b.jsonl")
    fault = fault_of(names, entry)
    assert (fault.where, fault.value) == ("config.yaml:3", "in/gone.jsonl") and "link" in fault.rule


def test_links_to_nothing_are_told_that_may_have_been_a_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here, "in/a.jsonl")
    for link in ("part2", ".lock", "README.md"):
        (here / "in" / link).symlink_to("gone")
    (here / "in/round").symlink_to("round")
    assert names("in") == ["in/a.jsonl"]
    assert "note: in/.lock, in/README.md, in/part2, in/round: left out, a link to nothing" in capsys.readouterr().out


def test_pipes_and_sockets_are_not_opened(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here, "in/a.jsonl")
    os.mkfifo(here / "in/pipe.txt")
    (here / "in/linked.txt").symlink_to("pipe.txt")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("in/socket.txt")
    for entry in ("in", "in/**/*"):
        assert names(entry) == ["in/a.jsonl"]
        assert "note: in/linked.txt, in/pipe.txt, in/socket.txt: left out, a pipe" in capsys.readouterr().out
    fault = fault_of(names, "in/pipe.txt")
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
    assert fault_of(names, "in").where == "in/closed.jsonl"
    (here / "in/sub").chmod(0)
    for entry in ("in", "in/**/*.jsonl"):
        fault = fault_of(names, entry)
        assert str(fault.value).rstrip("/") == "in/sub" and "Permission denied" in fault.rule
    (here / "in/sub").chmod(0o700)


NAMES = {
    os.fsdecode(b"caf\xe9.txt"): r"caf\xe9.txt",
    "café.txt": "café.txt",
    r"caf\xe9.txt": r"caf\\xe9.txt",
    "two\nlines.txt": r"two\u000alines.txt",
    "\x85.txt": r"\u0085.txt",
    "\u202etxt.a.txt": r"\u202etxt.a.txt",
    "日本\u3000語 #[x].txt": "日本\u3000語 #[x].txt",
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


HIDDEN = ".ipynb_checkpoints/a.jsonl", ".git/x/a.txt", "_temporary/0/part-0.json", "x.partial/b.txt", "venv/lib/top.txt"
HIDDEN += ("dropped/a.jsonl.zst",)
SINGLE = "_SUCCESS", "_metadata", "._a.jsonl", "LICENSE.txt", "licence-mit.txt", "README.txt", "requirements-dev.txt"
SINGLE += "dataset_infos.json", "state.json", "SHA256SUMS.txt", "b.jsonl.xz", "c.csv", "d.md", "part-00000", "x.jsonl.1"
SINGLE += (
    "my_quarantine.jsonl",
    "report.json",
    "s_manifest.json",
    "croissant.json",
    "tokenizer_config.json",
    "width64_tokens1024_validation99.json",
)


@pytest.mark.parametrize("place", ["in", "memory://in"])
def test_what_is_left_out_is_the_same_on_a_disk_and_at_an_address_and_named(
    here: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = ["a.jsonl", "sub/b.jl", "sub/c.jsonlines", "sub/state.jsonl"]
    write(here, *(f"in/{name}" for name in (*corpus, *HIDDEN, *SINGLE)))
    store = fsspec.filesystem("memory")
    store.put("in", "/in", recursive=True)
    above = "in" if place == "in" else "memory:///in"
    try:
        for entry in (place, f"{place}/**"):
            files = find_files([entry], "")
            assert [file.name for file in files] == [f"{above}/{name}" for name in corpus], entry
            left_out = {name for names in files.left_out.values() for name in names}
            hidden = {name.partition("/")[0] for name in HIDDEN}
            assert left_out == {f"{above}/{name}" for name in (*hidden, *SINGLE)}
            printed = capsys.readouterr().out
            assert all(name in printed for name in left_out), "few enough to be printed"
        for name in (*HIDDEN, *SINGLE):  # what an entry spells out is taken, or refused by its name
            spelt, folder = f"{place}/{name}", f"{place}/{name.partition('/')[0]}"
            if CORPUS.of(name):
                assert [len(names(each)) for each in (spelt, folder)] == [1, 1]
            else:
                assert fault_of(names, spelt).value == spelt
        assert names(f"{place}/_temp*/*/*") == [f"{above}/_temporary/0/part-0.json"]
    finally:
        store.rm("/in", recursive=True)


def test_a_hard_link_is_another_name_of_its_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here, "in/b.jsonl", "in/sub/c.jsonl", "d.jsonl")
    for name in ("in/a.jsonl", "in/sub/b2.jsonl"):
        os.link(here / "in/b.jsonl", here / name)
    os.link(here / "d.jsonl", here / "in/d.jsonl")
    assert names("in") == ["in/a.jsonl", "in/d.jsonl", "in/sub/c.jsonl"]
    assert "note: in/b.jsonl, in/sub/b2.jsonl: left out, another name" in capsys.readouterr().out
    assert "in/d.jsonl" in fault_of(names, "d.jsonl", "in").rule
