"""Sections as a table, as a page, and in a model card, which stays as it was but for the results."""

import html
import re
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from configs import fault_of
from huggingface_hub import ModelCard

from zerokara.base import manifest
from zerokara.evaluation import results
from zerokara.evaluation.results import PairedDifference, Row, Section, table
from zerokara.evaluation.scoring import Interval
from zerokara.publishing import exported_folder

SECTION = Section(
    name="bits per byte: old novels.jsonl",
    metric="bits_per_byte",
    unit="bits/byte",
    higher_is_better=False,
    rows=(
        Row("first", 1.25, Interval(1.2, 1.3), 100),
        Row("<b>&", 1.125, None, 100),
        Row("none", None, notes=("another quantity",)),
    ),
    differences=(PairedDifference("first", "<b>&", 0.125, Interval(0.1, 0.15)),),
    baselines=(Row("unigram", 2.5, Interval(2.25, 2.75)),),
    warnings=("few documents",),
    facts={"text": "old novels.jsonl", "documents": 100, "bytes": 5000},
    digits=3,
)
CARD = "---\nlicense: mit\nlanguage:\n- ro\n---\n# first\n\nÎn română.\n"


def test_the_table_is_ranked_and_names_what_is_not() -> None:
    lines = [line.split() for line in table(SECTION)]
    assert [words[0] for words in lines[2:6]] == ["<b>&", "first", "none", "(unigram)"]
    assert lines[3] == ["first", "1.250", "1.200", "to", "1.300", "100"]
    assert ["first", "-", "<b>&", "+0.125", "+0.100", "to", "+0.150"] in lines
    assert lines[-1] == ["warning:", "few", "documents"]


def test_the_page_shows_every_number_with_a_dot_and_escapes_names() -> None:
    markup = results.page([SECTION, replace(SECTION, rows=(Row("only", 9.5),), differences=())])
    elements, shown = re.findall(r"<(\w+)", markup), html.unescape(re.sub(r"<[^>]*>", "\n", markup))
    for text in ("<b>&", "1.125", "1.200 to 1.300", "+0.100 to +0.150", "few documents", "unigram"):
        assert text in shown, text
    assert elements.count("table") == 3 and not {"b", "script", "link", "img"} & set(elements)
    places = [float(place) for place in re.findall(r'cx="([^"]*)"', markup)]
    assert len(places) == 6 and places[0] == 0 < places[1] < places[2] < 100, "least, next, and the baseline"


def test_json_holds_what_was_measured() -> None:
    back = orjson.loads(orjson.dumps(SECTION.as_json()))
    assert back["rows"][0]["interval"] == [1.2, 1.3] and back["rows"][2]["value"] is None
    assert (back["baselines"][0]["model"], back["baselines"][0]["interval"]) == ("unigram", [2.25, 2.75])


def test_a_card_gets_the_results_and_keeps_the_rest() -> None:
    text = results.with_results(CARD, "first", [SECTION])
    data = ModelCard(text).data
    assert (data.license, data.language) == ("mit", ["ro"]) and text.endswith("# first\n\nÎn română.\n")
    (result,) = data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_name) == ("bits_per_byte", 1.25, "old novels.jsonl")
    assert "1.200 to 1.300, n = 100" in result.metric_name
    # Measured again: the value is replaced. Another text: it is added, and kept when the first is measured again.
    other = replace(SECTION, rows=(Row("first", 1.5),), facts={"text": "other"})
    text = results.with_results(results.with_results(text, "first", [other]), "first", [SECTION])
    assert sorted((one.dataset_name, one.metric_value) for one in ModelCard(text).data.eval_results) == [
        ("old novels.jsonl", 1.25),
        ("other", 1.5),
    ]
    assert results.with_results(CARD, "none", [SECTION]) == CARD


def test_an_export_stays_as_it_was_proved_but_for_the_record_of_its_card(tmp_path: Path) -> None:
    for name, text in (("README.md", CARD), ("config.json", "{}")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    spec, facts = manifest.StepSpec(exported_folder.STEP, {}), {"proof": {"holds": True}}
    outputs = {"card": tmp_path / "README.md", "config": tmp_path / "config.json"}
    manifest.write(tmp_path / "manifest.json", spec, outputs, facts, 1.0)
    before = orjson.loads((tmp_path / "manifest.json").read_bytes())
    results.add_to_card(tmp_path, "first", [SECTION])
    exported_folder.checked_files(tmp_path, exported_folder.proved(tmp_path))
    after = orjson.loads((tmp_path / "manifest.json").read_bytes())
    (was,), (now,) = (each["outputs"]["card"] for each in (before, after))
    assert was != now
    was.update(now)
    assert before == after
    (tmp_path / "README.md").write_text(CARD + "Mine.\n", encoding="utf-8")
    results.add_to_card(tmp_path, "first", [SECTION])  # into an edited card, too, which step 4 does not delete
    assert (tmp_path / "README.md").read_text(encoding="utf-8").endswith("Mine.\n")
    assert exported_folder.to_keep(tmp_path) == ["README.md"]


@pytest.mark.parametrize(
    "content",
    [b"---\nlicense: [mit\n---\n", b"---\nlicense: mit\n---\nRom\xe2n\n", b"---\n- a\n---\n", b"---\n1: a\n---\n",
     b"---\nmodel-index: [{name: a}]\n---\n"],
)  # fmt: skip
def test_a_card_that_cannot_be_read_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "README.md").write_bytes(content)
    fault = fault_of(exported_folder.read_card, tmp_path)
    assert fault.where == str(tmp_path / "README.md") and "repair the file" in fault.remedy and "\n" not in fault.rule


def test_a_folder_without_a_card_gets_one(tmp_path: Path) -> None:
    data = ModelCard(results.add_to_card(tmp_path, "first", [SECTION]).read_text(encoding="utf-8")).data
    assert data.model_name == "first" and len(data.eval_results) == 1
