"""Step 0 as a user runs it: the report, the clean text, what was dropped, any number of workers, damage and kills."""

import contextlib
import gzip
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from configs import typed
from corpus_files import json_lines, parquet, write_texts

from zerokara.base import manifest
from zerokara.base.errors import RunError
from zerokara.config.clean_config import CleanConfig
from zerokara.corpus.compressed import zstd_module
from zerokara.steps import clean_corpus

pytest.importorskip("datatrove")

MENU, FOOTER = "Home | News | About us", "All rights reserved."
WORDS = [f"{first}{last}" for first in ("ka", "mo", "ri", "su", "te") for last in ("na", "shi", "ro", "mi", "to", "ya")]
KANA = [chr(code) for code in range(0x3042, 0x3094)]


def _text(seed: int, is_spaced: bool = True) -> str:
    """Four lines of some forty words, or a hundred and fifty characters."""
    random = Random(seed)
    if is_spaced:
        return "\n".join(" ".join(random.choices(WORDS, k=40)) for _ in range(4))
    return "\n".join("".join(random.choices(KANA, k=150)) for _ in range(4))


def _changed(text: str) -> str:
    """The same with one word in a hundred, or two characters in six hundred, replaced."""
    parts, joint = (text.split(" "), " ") if " " in text else (list(text), "")
    for place in range(len(parts) // 3, len(parts), len(parts) // 2 + 1):
        parts[place] = "xx" if joint else "文"
    return joint.join(parts)


def _corpus(folder: Path) -> dict[str, list[str]]:
    """Two sources, and what should become of them by the names of the rules."""
    spaced, unspaced = ([_text(seed, is_spaced) for seed in range(60)] for is_spaced in (True, False))
    with_edges = [f"{MENU}\n\n{text}\n{FOOTER}" for text in spaced[:30]]
    made = {
        "clean": [with_edges[0], *spaced[1:], *unspaced],
        "exact_duplicates": [unspaced[3], unspaced[3]],
        "near_duplicates": [_changed(spaced[40]), _changed(unspaced[7])],
        "encoding_damage": [("informação é útil " * 9).encode().decode("cp1252")],
        "evaluation_overlap": [f"{_text(99)}\n{' '.join(_text(1000).split()[5:30])}"],
        "unreadable": ['{"text": 5}'],
        "repeated_lines": [f"{MENU}\n\n{FOOTER}"] * 29,
    }
    first = [*with_edges, *spaced[30:], *made["encoding_damage"], *made["near_duplicates"][:1]]
    (folder / "first.jsonl").write_bytes(json_lines(first) + b'{"text": 5}\n')
    second = [*unspaced, *made["exact_duplicates"], *made["near_duplicates"][1:], *made["evaluation_overlap"]]
    (folder / "second.jsonl.gz").write_bytes(gzip.compress(json_lines(second)))
    write_texts(folder / "test.jsonl", [_text(1000), "too short"])
    config = "input: [first.jsonl, second.jsonl.gz]\noutput_dir: out\nevaluation_data: test.jsonl\n"
    (folder / "clean_config.yaml").write_text(config, encoding="utf-8")
    return made


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with zstd_module().open(path) as lines:
        yield from map(json.loads, lines)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    monkeypatch.chdir(tmp_path)
    return _corpus(tmp_path)


@pytest.mark.slow
def test_a_report_and_then_the_clean_text(root: Path, made: dict[str, list[str]]) -> None:
    command = [sys.executable, str(root / "0_clean_corpus.py")]

    def run(*options: str) -> list[str]:
        done = subprocess.run([*command, *options], capture_output=True, encoding="utf-8", timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    Path("out/dry_run.partial").mkdir(parents=True)  # of one that was killed
    dry = run("--dry-run")
    assert not [*Path("out").iterdir()]
    reported = run()
    counts = {rule: f"{len(texts)} document" for rule, texts in made.items() if rule != "clean"}
    for shown in (dry, reported):
        assert all(any(re.match(rf" +{rule} +{count}", line) for line in shown) for rule, count in counts.items())
    page = Path("out/report.html").read_text(encoding="utf-8")
    assert "encoding_damage" in page and MENU in page and "<mark>" in page and "<script" not in page
    assert "informaÃ§Ã£o" in page and "informação" in page and "test.jsonl" in page
    assert not Path("out/text").exists()

    following = shlex.split(reported[-1])
    assert following[-2:] == ["--set", "report_only=false"]
    last = run(*following[-2:], "--set", "text_field=text")[-1]
    assert [word for word in shlex.split(last) if "=" in word] == ["input=[out/text]"]  # no other is of step 1
    for rule in counts:
        records = [*_records(Path("out", "dropped", f"{rule}.jsonl.zst"))]
        assert [record["text"] for record in records] == made[rule]
    texts = [record["text"] for path in sorted(Path("out/text").iterdir()) for record in _records(path)]
    assert texts == made["clean"]
    packed = [path.read_bytes() for path in Path("out").rglob("*.zst")]
    assert packed and all(content[4] & 4 for content in packed), "a frame ends with a checksum (RFC 8878, 3.1.1.1.1)"
    assert not list(Path("out").glob("work*"))
    assert any("done already" in line for line in run(*following[-2:]))
    write_texts(Path("test.jsonl"), [_text(1001)])
    changed = subprocess.run([*command, *following[-2:]], capture_output=True, encoding="utf-8", check=False)
    assert changed.returncode == 2 and "evaluation_data" in changed.stderr
    before = Path("out/report.json").read_bytes()
    report = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert report.returncode == 2 and "--redo" in report.stderr, "of other settings than the text that lies there"
    assert Path("out/report.json").read_bytes() == before


def test_every_record_names_its_source_and_its_line(made: dict[str, list[str]]) -> None:
    assert clean_corpus.main(["--set", "report_only=false", "--set", "repeated_lines=0"]) == 0
    lines = {
        "first.jsonl": Path("first.jsonl").read_text(encoding="utf-8").splitlines(),
        "second.jsonl.gz": gzip.decompress(Path("second.jsonl.gz").read_bytes()).decode().splitlines(),
    }
    paths = [*Path("out/text").iterdir(), *Path("out/dropped").iterdir()]
    records = [record for path in paths for record in _records(path)]
    assert len(records) == sum(map(len, lines.values()))
    for record in records:
        if "reason" not in record:
            assert json.loads(lines[record["source"]][record["line"] - 1])["text"] == record["text"]
        if "copy_of" in record:
            original = json.loads(lines[record["copy_of"]["source"]][record["copy_of"]["line"] - 1])["text"]
            assert record["text"] in (original, _changed(original))


def test_texts_that_become_equal_without_the_lines_of_their_sites_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two sites with the same 30 texts: the first text of each keeps the menu."""
    monkeypatch.chdir(tmp_path)
    menus = [" ".join(f"{site}{number}" for number in range(30)) for site in ("home", "other")]
    write_texts(Path("text.jsonl"), [f"{menu}\n\n{_text(seed)}" for menu in menus for seed in range(30)])
    settings = ("input=[text.jsonl]", "output_dir=out", "evaluation_data=[]", "near_duplicates=0")
    assert clean_corpus.main(["--config", "/dev/null", *typed(*settings)]) == 0
    assert "29 texts became equal to others without their repeated lines" in capsys.readouterr().out


@pytest.mark.slow
def test_the_same_bytes_for_any_number_of_workers_and_after_a_kill(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Several tasks: a plain file that is cut, in which copies are far from their originals, and a packed one.
    texts = [_text(seed % 650, seed % 2 == 0) for seed in range(1000)]
    write_texts(tmp_path / "large.jsonl", [_changed(text) if n % 7 == 0 else text for n, text in enumerate(texts)])
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(json_lines([_text(seed) for seed in range(1000, 1200)])))
    (tmp_path / "clean_config.yaml").write_text("evaluation_data: []\nrepeated_lines: 3\nreport_only: false\n")
    command = [sys.executable, str(root / "0_clean_corpus.py"), "--set", "input=[large.jsonl, packed.jsonl.gz]"]

    def run(output: str, *options: str) -> dict[str, bytes]:
        arguments = [*command, "--set", f"output_dir={output}", *options]
        subprocess.run(arguments, check=True, capture_output=True, timeout=240)
        folder = tmp_path / output
        return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.zst"))}

    whole = run("one", "--set", "num_workers=1")
    assert len([name for name in whole if name.startswith("text/")]) > 2
    records = [record for path in Path("one/dropped").iterdir() for record in _records(path)]
    assert len(records) > 300 and all(record["copy_of"]["line"] < record["line"] for record in records[:100])

    command += ["--set", "num_workers=2"]
    for stage in ("reading", "writing"):
        killed = subprocess.Popen([*command, "--set", "output_dir=killed"])
        while not list(Path("killed").glob(f"work*/*/{stage}/completions/*")):
            assert killed.poll() is None
            time.sleep(0.005)
        workers = psutil.Process(killed.pid).children(recursive=True)
        killed.kill()
        killed.wait()
        assert not psutil.wait_procs(workers, 10)[1], "who works for a step ends with it"
    assert run("killed") == whole


@pytest.mark.slow
def test_a_worker_that_is_killed_is_told(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "text.jsonl", (_text(seed, seed % 2 == 0) for seed in range(600)))
    (tmp_path / "clean_config.yaml").write_text("input: text.jsonl\noutput_dir: out\nevaluation_data: []\n")
    command = [sys.executable, str(root / "0_clean_corpus.py"), "--set", "num_workers=2"]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, encoding="utf-8")
    while not (
        workers := [each for each in psutil.Process(running.pid).children(True) if _depth(each, running.pid) == 2]
    ):
        assert running.poll() is None
        time.sleep(0.005)
    workers[0].kill()
    assert running.wait(60) == 1
    assert running.stderr and "a process died" in running.stderr.read()
    assert subprocess.run(command, check=False, capture_output=True, timeout=60).returncode == 0


def _depth(process: psutil.Process, ancestor: int) -> int:
    """How many generations stand between a process and its ancestor: the workers are the fork server's children."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [each.pid for each in process.parents()].index(ancestor) + 1
    return 0


@pytest.mark.slow
def test_damage_is_counted_and_never_fatal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zerokara.corpus.documents.MAX_LINE_BYTES", 1 << 20)
    good = json_lines([_text(seed) for seed in range(50)])
    long_line = b'{"text": "' + b"x" * (3 << 20) + b'"}\n'
    (tmp_path / "a.jsonl").write_bytes(good + long_line + json_lines(["\n".join(["a"] * 9)]) + b"\xff\xfe\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json_lines([_text(seed) for seed in range(50, 90)]))[:-300])
    bomb = json_lines([_text(90)]) + b" " * (50 << 20) + b"\n"
    (tmp_path / "c.jsonl.zst").write_bytes(zstd_module().compress(bomb))
    (tmp_path / "clean_config.yaml").write_text("input: ['*.jsonl*']\noutput_dir: out\nreport_only: false\n")
    assert clean_corpus.main([]) == 2 and not Path("out/text").exists()
    assert clean_corpus.main(typed(max_bad_fraction=0.1)) == 0
    reasons = [record["reason"] for record in _records(Path("out/dropped/unreadable.jsonl.zst"))]
    assert {"invalid UTF-8", "truncated or damaged file"} <= {*reasons}
    texts = [record["text"] for path in sorted(Path("out/text").iterdir()) for record in _records(path)]
    assert texts[:50] == [_text(seed) for seed in range(50)] and _text(90) in texts and _text(50) in texts


def test_what_damaged_files_lost_is_counted_and_too_much_of_it_ends_the_cleaning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of an interrupted download nobody knows how much is missing; what it kept of the work is not done again."""
    monkeypatch.chdir(tmp_path)
    packed = gzip.compress(json_lines([_text(seed) for seed in range(400)]))
    Path("cut.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    write_texts(Path("whole.jsonl"), [_text(seed) for seed in range(400, 500)])
    rows = parquet(50, text=[_text(seed) for seed in range(500, 600)])
    Path("rows.parquet").write_bytes(rows[:100] + bytes(200) + rows[300:])
    names = "[cut.jsonl.gz, rows.parquet, whole.jsonl]"
    command = ["--config", "/dev/null", *typed(f"input={names}", "evaluation_data=[]", "output_dir=out")]
    assert clean_corpus.main(command) == 0
    said = capfd.readouterr().out
    lost = f"{Path('cut.jsonl.gz').stat().st_size / 1000:.1f} kB"
    assert re.search(r"lost .*cut\.jsonl\.gz \(.*" + f"{lost} of {lost} lost", said) and "rows.parquet (" in said
    assert re.search(r"unreadable +51 documents", said), "the rows of a group, and the end of a file"
    assert re.search(r"no clean text can be written: .*max_bad_fraction = 0\.01: .* lost .* or set it to 0\.\d+", said)
    assert "report_only=false" not in said, "which would be refused"
    page = Path("out/report.html").read_text(encoding="utf-8")
    assert "are lost" in page and "this text is clean" not in page and "evaluation data</dt>" not in page
    clean = [*command, *typed("report_only=false")]
    assert clean_corpus.main(clean) == 2 and not Path("out/text").exists()
    faults = capfd.readouterr().err
    assert faults.count("max_bad_fraction = 0.01") == 2 and "cut.jsonl.gz" in faults
    (bad,) = re.findall(r"they are in (\S+)-\*", faults)
    assert [*Path().glob(f"{bad}-*")]
    monkeypatch.setattr("zerokara.cleaning.stages.Judge", None)  # nothing is read again
    assert clean_corpus.main([*clean, *typed("max_bad_fraction=1")]) == 0
    assert json.loads(Path("out/report.json").read_bytes())["sources"]["cut.jsonl.gz"]["unreadable"]["lost bytes"]


def test_a_text_that_changes_at_the_end_is_not_recorded_as_cleaned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts(Path("a.jsonl"), [_text(seed) for seed in range(3)])
    command = ["--config", "/dev/null", *typed("input=[a.jsonl]", "evaluation_data=[]", "output_dir=out")]
    hash_files = manifest.hash_files

    def changing(files: Iterable[Path]) -> dict[manifest.FileKey, str]:
        with Path("a.jsonl").open("ab") as file:
            file.write(json_lines([_text(9)]))
        return hash_files(files)

    with monkeypatch.context() as patched:
        patched.setattr(manifest, "hash_files", changing)
        assert clean_corpus.main([*command, *typed("report_only=false")]) == 1
    assert "changed while it was read" in capfd.readouterr().err and not Path("out/manifest.json").exists()


def test_slurm_may_be_out_of_reach_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from zerokara.cleaning import executors

    squeue = tmp_path / "squeue"
    squeue.write_text(
        "#!/bin/sh\nread n < count; echo $((n + 1)) > count\n"
        "case $n in 0) echo 17;; 1|2) echo 'slurm_load_jobs error' >&2; exit 1;; 3) echo 17;; esac\n"
    )
    squeue.chmod(0o755)
    (tmp_path / "count").write_text("0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(executors, "_POLL_SECONDS", 0)
    executors._wait_for_slurm("job")
    assert (tmp_path / "count").read_text() == "5\n"
    assert capsys.readouterr().out.count("slurm_load_jobs error") == 1
    (tmp_path / "count").write_text("1\n")
    monkeypatch.setattr(executors, "_PATIENCE_SECONDS", -1)
    with pytest.raises(RunError, match="slurm_load_jobs error; the same command waits"):
        executors._wait_for_slurm("job")


def test_a_large_compressed_file_is_warned_of(made: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    from zerokara.cleaning import executors
    from zerokara.cleaning.plan import make_plan

    plan = make_plan(CleanConfig(input=("first.jsonl", "second.jsonl.gz"), evaluation_data=()))
    assert made and not executors.memory_warning(plan)
    monkeypatch.setattr(executors, "_WORKER_BYTES", 1000)
    assert "zcat second.jsonl.gz | split" in executors.memory_warning(plan)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["near_duplicates=0.3"], "at least 0.5"),
        (["evaluation_data=[first.jsonl]"], "is in the corpus"),
        (["filters={GopherQualityFilter: {min_words: 3}}"], "min_words"),
        (['filters={GopherQualityFilter: {min_doc_words: "20"}}'], "min_doc_words"),
        (["filters={GopherQualityFilter: {min_doc_words: 500, min_stop_words: a}}"], "min_stop_words"),
        (["filters={GopherRepetitionFilter: {top_n_grams: [2]}}"], "top_n_grams"),
        (["filters={FineWebQualityFilter: {line_punct_thr: x}}"], "line_punct_thr"),
        (["filters={C4QualityFilter: {}}"], "GopherRepetitionFilter"),
        (["languages=[pt, jp]"], "names jp"),
        (["executor_options={partition: x}"], "has no effect"),
        (["executor=slurm"], "must name a partition"),
        (["output_dir=mine"], "which no run of this step wrote"),
        (["evaluation_data=[cut.jsonl.gz]"], "cut.jsonl.gz: is damaged"),
    ],
)
def test_what_cannot_be_is_refused(
    options: list[str], told: str, made: dict[str, list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    Path("cut.jsonl.gz").write_bytes(Path("second.jsonl.gz").read_bytes()[:-99])
    Path("mine/text").mkdir(parents=True)
    Path("mine/text/00000.jsonl.zst").write_bytes(b"mine")
    assert clean_corpus.main([word for option in options for word in ("--set", option)]) == 2
    assert told in capfd.readouterr().err
    assert Path("mine/text/00000.jsonl.zst").read_bytes() == b"mine"


def test_another_cleaning_leaves_nothing_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a larger text, of other rules; but a file of somebody else's beside the text ends it."""
    monkeypatch.chdir(tmp_path)
    write_texts(Path("a.jsonl"), ["too short", *(_text(seed) for seed in range(3))])
    command = ["--config", "/dev/null", "--redo"]
    command += typed("input=[a.jsonl]", "report_only=false", "evaluation_data=[]", "output_dir=out")
    filtered = typed("filters={GopherQualityFilter: {min_doc_words: 50}}")

    def left() -> list[str]:
        return sorted(path.relative_to("out").as_posix() for path in Path("out").glob("*/*"))

    assert clean_corpus.main([*command, *filtered]) == 0
    first = left()
    assert first == ["dropped/GopherQualityFilter.jsonl.zst", "text/00000.jsonl.zst"]
    more, record = Path("out/text/00001.jsonl.zst"), Path("out/manifest.json")  # as of two tasks
    more.write_bytes(Path("out/text/00000.jsonl.zst").read_bytes())
    made = json.loads(record.read_bytes())
    made["outputs"]["clean"].append({**made["outputs"]["clean"][0], "path": "text/00001.jsonl.zst"})
    record.write_text(json.dumps(made), encoding="utf-8")
    assert clean_corpus.main(command) == 0 and left() == first[1:]
    assert clean_corpus.main([*command, *filtered]) == 0 and left() == first
    more.touch()
    assert clean_corpus.main(command) == 2
    assert " 00001.jsonl.zst, which no run of this step wrote" in capsys.readouterr().err


def test_the_clean_text_below_its_corpus_is_not_cleaned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts(Path("all/a.jsonl"), [_text(seed) for seed in range(3)])
    settings = typed("input=[all]", "report_only=false", "evaluation_data=[]", "output_dir=all/clean")
    for options, told in (([], "clean: done, "), ([], "done already"), (["--redo"], "clean: done, ")):
        assert clean_corpus.main(["--config", "/dev/null", *settings, *options]) == 0
        assert told in capsys.readouterr().out


def test_rules_for_single_documents(made: dict[str, list[str]]) -> None:
    write_texts(
        Path("first.jsonl"),
        [
            "O rato roeu a roupa do rei de Roma, e a rainha, com raiva, resolveu remendar." * 4,
            "The quick brown fox jumps over the lazy dog, and then it sleeps for a while." * 4,
        ],
    )
    settings = ["report_only=false", "input=[first.jsonl]", "languages=[pt]"]
    assert clean_corpus.main([word for each in settings for word in ("--set", each)]) == 0
    (record,) = _records(Path("out/dropped/languages.jsonl.zst"))
    assert record["line"] == 2
    settings[2] = "filters={GopherQualityFilter: {min_doc_words: 500}}"
    assert clean_corpus.main(["--redo", *[word for each in settings for word in ("--set", each)]]) == 0
    assert len([*_records(Path("out/dropped/GopherQualityFilter.jsonl.zst"))]) == 2


def test_a_file_that_came_after_the_report_stays_and_a_move_that_was_cut_off_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts(Path("a.jsonl"), [_text(seed) for seed in range(3)])
    Path("sentence_piece_config.yaml").write_text("text_field: content\n", encoding="utf-8")
    command = ["--config", "/dev/null", *typed("input=[a.jsonl]", "evaluation_data=[]", "output_dir=out")]
    assert clean_corpus.main(command) == 0
    other = Path("out/text/my_own.jsonl.zst")
    other.parent.mkdir()
    other.write_bytes(b"mine")
    assert clean_corpus.main([*command, *typed("report_only=false")]) == 2 and other.read_bytes() == b"mine"
    other.unlink()
    monkeypatch.setattr("zerokara.base.manifest.write", lambda *_, **__: 1 / 0)
    assert clean_corpus.main([*command, *typed("report_only=false")]) == 1, "killed before its manifest"
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert clean_corpus.main([*command, *typed("near_duplicates=0")]) == 0, "a report by other rules in between"
    capsys.readouterr()
    assert clean_corpus.main([*command, *typed("report_only=false")]) == 0
    assert "--set text_field=text" in capsys.readouterr().out, "of the clean text, whatever that of the raw is"
