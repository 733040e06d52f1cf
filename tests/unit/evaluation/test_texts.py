"""The documents that are measured: all that fit, else drawn at random."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from zerokara.config.evaluate_config import TextSettings
from zerokara.corpus.find import find_files
from zerokara.errors import UserError
from zerokara.evaluation.inputs import MeasuredText, read_texts


def settings(folder: Path, *lines: str, **others: int) -> TextSettings:
    (folder / "held_out.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return TextSettings(texts=(str(folder / "held_out.jsonl"),), **others)


def read(config: TextSettings, seed: int = 1) -> MeasuredText:
    (text,) = read_texts(config, find_files(config.texts, "here"), seed)
    return text


def test_documents_are_drawn_up_to_the_limit(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"{number:03d} țară"}) for number in range(200)]  # 10 bytes each
    drawn = read(settings(tmp_path, *lines, max_text_bytes=505))
    assert len(drawn.documents) == 50 and sum(drawn.bytes) == 500 and drawn.num_found == 200
    assert list(drawn.documents) == sorted(drawn.documents)
    assert sum(int(text[:3]) for text in drawn.documents) / 50 == pytest.approx(99.5, abs=25)  # three standard errors
    other = read(settings(tmp_path, *lines, max_text_bytes=505), seed=2)
    assert other.documents != drawn.documents and other.content != drawn.content
    assert len(read(settings(tmp_path, *lines)).documents) == 200
    assert len(read(settings(tmp_path, *lines, max_text_bytes=1)).documents) == 1


def test_the_draw_is_the_beginning_of_a_shuffled_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chance = random.Random(3)
    documents = [f"{number:03d}" * chance.choice((2, 5, 100)) for number in range(60)]
    lines = [json.dumps({"text": text}) for text in documents]
    for seed in range(8):
        numbers, prefix, total = random.Random(seed), [], 0
        for _, text in sorted((numbers.random(), text) for text in documents):
            if (total := total + len(text)) > 900:
                break
            prefix.append(text)
        drawn = read(settings(tmp_path, *lines, max_text_bytes=900), seed)
        assert list(drawn.documents) == sorted(prefix), seed
    assert "warning" not in capsys.readouterr().err
    read(settings(tmp_path, *lines, max_text_bytes=5))
    assert "more than max_text_bytes" in "".join(capsys.readouterr())


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
        settings(tmp_path / folder, '{"text": "one"}')
    config = TextSettings(texts=tuple(str(tmp_path / folder / "held_out.jsonl") for folder in ("old", "new")))
    names = [text.name for text in read_texts(config, find_files(config.texts, "here"), 1)]
    assert names == ["old/held_out.jsonl", "new/held_out.jsonl"]


def test_bad_lines_are_counted_and_a_text_without_documents_is_refused(tmp_path: Path) -> None:
    text = read(settings(tmp_path, '{"text": "one"}', "{", "", '{"body": "two"}'))
    assert text.documents == ("one",) and sum(text.bad_lines.values()) == 2
    with pytest.raises(UserError) as refused:
        read(settings(tmp_path, '{"body": "two"}'))
    assert refused.value.faults[0].key == "texts[0]" and "text field missing (1)" in str(refused.value)
