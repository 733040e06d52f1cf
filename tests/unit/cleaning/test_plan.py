"""What cleaning looks for: the held-out texts that the other configurations name."""

import gzip
from pathlib import Path

import pytest
from configs import fault_of
from corpus_files import json_lines, write_texts

from zerokara.base.manifest import FileRecord
from zerokara.cleaning.plan import Plan, make_plan
from zerokara.config.clean_config import CleanConfig
from zerokara.corpus.find import FoundFiles, InputFile
from zerokara.corpus.token_hashes import hashes_of


def test_held_out_text_of_the_pretraining_is_looked_for_and_what_cannot_be_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "the quick brown fox jumps over the lazy dog and then it sleeps for a while"
    Path("held.jsonl").write_bytes(json_lines([text, *["short"] * 200]) + b"{broken\n\n")
    Path("held.txt").write_text("what is short\n", encoding="utf-8")
    Path("config.yaml").write_text("input_jsonl: train.jsonl\nvalid_jsonl: [held.jsonl, held.txt]\n", encoding="utf-8")
    write_texts(tmp_path / "train.jsonl", [f"so {text} here", "another one"])
    plan = make_plan(CleanConfig(input=("train.jsonl",)))
    assert [file.name for file in plan.evaluation_files] == ["held.jsonl", "held.txt"]
    assert len(plan.evaluation) == len(text.split()) - 12
    printed = capsys.readouterr().out
    assert "1 lines of held.jsonl" in printed
    Path("held.txt").write_bytes("não se lê\n".encode("latin-1") * 3)
    fault = fault_of(getattr, make_plan(CleanConfig(input=("train.jsonl",))), "evaluation")
    assert fault.where == "held.txt" and fault.rule == "3 of its 3 lines cannot be read"
    Path("held.txt.gz").write_bytes(gzip.compress(b"all of it\n" * 900)[:-9])
    plan = make_plan(CleanConfig(input=("train.jsonl",), evaluation_data=("held.txt.gz",)))
    assert fault_of(getattr, plan, "evaluation").rule == "is damaged"


def test_a_configuration_of_any_name_is_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "train.jsonl", ["anything"])
    write_texts(tmp_path / "test.jsonl", ["a text of the test"])
    settings = "metric: chrf\ntrain_data: [train.jsonl]\ntest_data: [test.jsonl]\ninit_from: there\n"
    Path("mine.yaml").write_text(settings, encoding="utf-8")
    plan = make_plan(CleanConfig(input=("train.jsonl",), evaluation_data=("mine.yaml",)))
    assert [file.name for file in plan.evaluation_files] == ["test.jsonl"]


def test_the_corpus_by_another_name_is_no_evaluation_data(tmp_path: Path) -> None:
    write_texts(tmp_path / "a" / "train.jsonl", ["a text"])
    (tmp_path / "b").symlink_to(tmp_path / "a")
    config = CleanConfig(
        input=(str(tmp_path / "a" / "train.jsonl"),), evaluation_data=(str(tmp_path / "b" / "train.jsonl"),)
    )
    assert "which is in the corpus" in fault_of(make_plan, config).rule


def test_a_copy_is_found_whatever_its_line_ends_and_short_texts_are_counted(tmp_path: Path) -> None:
    words = [f"w{number}" for number in range(40)]
    wrapped = "\n".join(" ".join(words[start : start + 5]) for start in range(0, 40, 5))
    (tmp_path / "held.txt").write_text(wrapped, encoding="utf-8")
    write_texts(tmp_path / "short.jsonl", ["Capitala României este București ."])
    write_texts(tmp_path / "train.jsonl", ["anything"])
    held = (str(tmp_path / "held.txt"), str(tmp_path / "short.jsonl"))
    plan = make_plan(CleanConfig(input=(str(tmp_path / "train.jsonl"),), evaluation_data=held))

    def owners(text: str) -> set[int]:
        return {*plan.evaluation.owners_of(hashes_of(text))}

    assert owners(wrapped) == owners(" ".join(words)) == {0} and not owners(" ".join(words[:12]))
    assert plan.evaluation.num_short == 9, "each line, and the other text"


@pytest.mark.parametrize("name", ["text", "dropped"])
def test_raw_text_among_the_clean_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "out" / name).mkdir(parents=True)
    write_texts(tmp_path / "out" / name / "raw.jsonl", ["a text"])
    config = CleanConfig(input=(f"{tmp_path}/out/{name}/*.jsonl",), output_dir=str(tmp_path / "out"))
    assert "the clean text would lie beside the raw" in fault_of(make_plan, config).rule


def test_a_cell_of_a_txt_table_is_a_text(tmp_path: Path) -> None:
    """Of ten words, which a copy has without the number and the label beside them."""
    review = "este film foarte frumos a fost făcut anul trecut la"
    (tmp_path / "test.txt").write_text(f"id\tdocument\tlabel\n101\t{review}\t1\n", encoding="utf-8")
    write_texts(tmp_path / "train.jsonl", ["anything"])
    config = CleanConfig(input=(str(tmp_path / "train.jsonl"),), evaluation_data=(str(tmp_path / "test.txt"),))
    assert {*make_plan(config).evaluation.owners_of(hashes_of(f"so {review} here"))} == {0}


def test_the_work_on_a_remote_file_is_not_that_on_another_content(tmp_path: Path) -> None:
    def folder(content: str) -> Path:
        remote = FileRecord("s3://bucket/a.jsonl", 100, content, 0)
        files = FoundFiles([InputFile(Path("a.jsonl"), 0, "jsonl", "none", 100, 0, remote)])
        return Plan(CleanConfig(output_dir=str(tmp_path)), files, []).work_folder

    assert folder("etag:first") == folder("etag:first") != folder("etag:second")
