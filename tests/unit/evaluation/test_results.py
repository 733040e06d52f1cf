"""Sections as a table, as a page, and in a model card, which stays as it was but for the results."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import orjson
import pytest
from huggingface_hub import ModelCard

from zerokara import manifest
from zerokara.errors import UserError
from zerokara.evaluation import model_index as card
from zerokara.evaluation import results as page
from zerokara.evaluation.results import Baseline, PairedDifference, Row, Section, table
from zerokara.evaluation.scoring import Interval
from zerokara.huggingface import exported_folder

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
    baselines=(Baseline("unigram", 2.5, Interval(2.25, 2.75)),),
    warnings=("few documents",),
    facts={"text": "old novels.jsonl", "documents": 100, "bytes": 5000},
    digits=3,
)
CARD = "---\nlicense: mit\nlanguage:\n- ro\n---\n# first\n\nÎn română.\n"


class Texts(HTMLParser):
    """The texts of a page, and its elements."""

    def __init__(self, markup: str):
        super().__init__()
        self.texts: list[str] = []
        self.elements: list[str] = []
        self.feed(markup)

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)


def test_the_table_is_ranked_and_names_what_is_not() -> None:
    lines = [line.split() for line in table(SECTION)]
    assert [words[0] for words in lines[2:6]] == ["<b>&", "first", "none", "(unigram)"]
    assert lines[3] == ["first", "1.250", "1.200", "to", "1.300", "100"]
    assert ["first", "-", "<b>&", "+0.125", "+0.100", "to", "+0.150"] in lines
    assert lines[-1] == ["warning:", "few", "documents"]


def test_the_page_shows_every_number_and_escapes_names() -> None:
    found = Texts(page.page([SECTION]))
    for text in ("<b>&", "1.125", "1.200 to 1.300", "+0.100 to +0.150", "few documents", "unigram"):
        assert any(text in one for one in found.texts), text
    assert found.elements.count("svg") == 2 and not {"b", "script", "link", "img"} & set(found.elements)


def test_sections_of_one_name_keep_their_own_plots() -> None:
    other = replace(SECTION, rows=(Row("only", 9.5),), differences=())
    made = page.page([SECTION, other])
    assert made.count(page.value_plot(SECTION)) == made.count(page.value_plot(other)) == 1
    assert made.count(page.difference_plot(SECTION)) == 1


def test_json_holds_what_was_measured() -> None:
    back = orjson.loads(orjson.dumps(SECTION.as_json()))
    assert back["rows"][0]["interval"] == [1.2, 1.3] and back["rows"][2]["value"] is None
    assert back["baselines"] == [{"name": "unigram", "value": 2.5, "interval": [2.25, 2.75]}]


def test_a_card_gets_the_results_and_keeps_the_rest() -> None:
    text = card.with_results(CARD, "first", [SECTION])
    data = ModelCard(text).data
    assert (data.license, data.language) == ("mit", ["ro"]) and text.endswith("# first\n\nÎn română.\n")
    (result,) = data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_name) == ("bits_per_byte", 1.25, "old novels.jsonl")
    assert "1.200 to 1.300, n = 100" in result.metric_name
    # Measured again: the value is replaced. Another text: it is added, and kept when the first is measured again.
    other = Section(**{**SECTION.__dict__, "rows": (Row("first", 1.5),), "facts": {"text": "other"}})
    text = card.with_results(card.with_results(text, "first", [other]), "first", [SECTION])
    assert sorted((one.dataset_name, one.metric_value) for one in ModelCard(text).data.eval_results) == [
        ("old novels.jsonl", 1.25),
        ("other", 1.5),
    ]
    assert card.with_results(CARD, "none", [SECTION]) == CARD


def exported(folder: Path) -> Path:
    folder.mkdir()
    (folder / "README.md").write_text(CARD, encoding="utf-8")
    (folder / "config.json").write_text("{}", encoding="utf-8")
    spec, facts = manifest.StepSpec(exported_folder.STEP, {}), {"proof": {"holds": True}}
    manifest.write(folder / "manifest.json", spec, {"all": sorted(folder.iterdir())}, facts, 1.0)
    return folder


def test_an_export_stays_as_it_was_proved(tmp_path: Path) -> None:
    folder = exported(tmp_path / "export")
    before = orjson.loads((folder / "manifest.json").read_bytes())
    card.add(folder, "first", [SECTION])
    exported_folder.check_unchanged(folder, exported_folder.proved(folder))
    after = orjson.loads((folder / "manifest.json").read_bytes())
    (was,), (now,) = ([one for one in each["outputs"]["all"] if one["path"] == "README.md"] for each in (before, after))
    assert was != now
    was.update(now)
    assert before == after, "nothing but the record of the card changes"


def test_a_card_that_was_changed_by_hand_is_not_taken_for_step_4s(tmp_path: Path) -> None:
    folder = exported(tmp_path / "export")
    (folder / "README.md").write_text(CARD + "Mine.\n", encoding="utf-8")
    with pytest.raises(UserError, match="changed since the export was proved"):
        card.add(folder, "first", [SECTION])
    assert (folder / "README.md").read_text(encoding="utf-8") == CARD + "Mine.\n"


def test_a_folder_without_a_card_gets_one(tmp_path: Path) -> None:
    data = ModelCard(card.add(tmp_path, "first", [SECTION]).read_text(encoding="utf-8")).data
    assert data.model_name == "first" and len(data.eval_results) == 1
