"""The model card says what the facts say, and nothing where there is no fact."""

import ast
import json
import re
import tomllib
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import pytest
from configs import fault_of
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from zerokara.base.durable import write_json
from zerokara.corpus.find import public_name
from zerokara.examples import facts as finetuning
from zerokara.examples.facts import FinetuneFacts, SplitCounts, read
from zerokara.publishing import card


@pytest.fixture
def facts() -> dict[str, Any]:
    split = {"documents": 12, "tokens": 3456, "text_bytes": 7000}
    none = {"documents": 0, "tokens": 0, "text_bytes": 0}
    return {
        "model": {
            "architecture": "llama", "class": "LlamaForCausalLM", "parameters": 1234567, "num_layers": 2,
            "hidden_size": 8, "ffn_hidden_size": 16, "num_attn_heads": 4, "num_kv_heads": 2, "seq_len": 64,
            "vocab_size": 321, "tie_word_embeddings": True, "rope_theta": 5000.0, "dtype": "bf16",
            "auto_class": "AutoModelForCausalLM", "task": "text-generation",
            "moe_layers": [],
        },
        "training": {
            "step": 100, "init_from": None, "tokens": 51200, "epochs": 0.701, "seconds": 60.0, "precision": "fp32",
            "settings": {"lr": 0.001},
            "curve": {"loss": [{"step": 10, "value": 5.5}, {"step": 100, "value": 2.25}], "valid_loss": [],
                      "valid_bits_per_byte": []},
        },
        "data": {"train": split, "valid": none,
                 "sources": [{"name": "ja|1.jsonl", "train": split, "valid": none, "read": None}]},
        "tokenizer": {"vocab_size": 321, "sha256": "abc"},
        "proof": {
            "logits": {"positions": 99, "max_difference": 2e-6, "tolerance": 1e-4, "logit_std": 1.5, "argmax_ties": 0,
                       "greedy_tokens": 48, "greedy_prompts": 2, "greedy_ties": 0, "bf16_max_difference": 0.02,
                       "bf16_argmax_equal": 0.995},
            "token_ids": {"lines": 10000, "equal": 9998, "ties": 2},
        },
        "samples": [{"prompt": "吾輩は", "greedy": "猫\n```\nである", "sampled": "犬"}],
    }  # fmt: skip


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name in the template that stands for nothing is an error, where it would print nothing."""
    monkeypatch.setattr(jinja2, "Template", partial(jinja2.Template, undefined=jinja2.StrictUndefined))


def render(facts: dict[str, Any]) -> str:
    return card.render(facts, name="me/first", language=["ja", "no"], license="cc-by-4.0")


def test_every_template_comes_with_the_package() -> None:
    root = Path(__file__).resolve().parents[3]
    package = root / "original_codes/zerokara"
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["zerokara"]
    assert {path for each in patterns for path in package.glob(each)} == set(package.rglob("*.jinja"))


def test_an_encoder_decoder_has_a_card_of_its_own(facts: dict[str, Any]) -> None:
    facts["model"] |= {"task": "text2text-generation", "auto_class": "AutoModelForSeq2SeqLM", "architecture": "switch"}
    facts["model"] |= {"moe_layers": [1, 3], "num_experts": 8, "moe_ffn_hidden_size": 16, "experts_per_token": 1}
    facts["model"]["active_parameters"] = 345678
    text = render(facts)
    data = ModelCard(text).data
    assert data.pipeline_tag is None, "transformers 5 has no such pipeline"
    assert "text2text-generation" in data.tags and "rope" not in text
    for words in (
        "AutoModelForSeq2SeqLM.from_pretrained",
        "skip_special_tokens=False",
        "345,678",
        "| 8 in layers 1, 3",
    ):
        assert words in text, words


def test_what_nobody_named_is_not_named(facts: dict[str, Any]) -> None:
    text = card.render(facts, name="me/first", language=[], license="")
    assert "language:" not in text and "license" not in text and "datasets:" not in text and " parameters, " in text


def test_a_continued_model_may_converse_as_the_one_it_began_as(facts: dict[str, Any]) -> None:
    assert "not trained to follow" in render(facts)
    facts["training"]["init_from"], facts["model"]["converses"] = "base", True
    text = render(facts)
    assert "not trained to follow" not in text and "conversational" in ModelCard(text).data.tags
    assert "apply_chat_template" in text


def test_what_was_compared_at_export_is_said(facts: dict[str, Any]) -> None:
    """A mixture of experts is not compared where rounding decides; both sides have the weights that are saved."""
    assert "of the trained model with its weights rounded to bf16, over 99 tokens" in render(facts)
    facts["model"]["dtype"], facts["proof"]["logits"]["positions_after_router_ties"] = "fp32", 9
    assert "of the trained model, over 90 tokens" in render(facts)


def test_sources_on_the_hub_and_what_was_read_of_each(facts: dict[str, Any]) -> None:
    facts["data"] |= {"datasets": ["ada/novels"]}
    facts["data"]["sources"][0] |= {"name": public_name("hf://datasets/ada/novels@v1/data/*.parquet"), "read": 17280}
    text = render(facts)
    assert ModelCard(text).data.datasets == ["ada/novels"]
    assert "| ada/novels | train | 12 | 3,456 | 7.0 kB | 17,280 |" in text
    assert public_name("corpora/novels.jsonl") == "novels.jsonl"


def test_the_numbers_stand_in_it_and_the_hub_reads_its_front_matter(facts: dict[str, Any]) -> None:
    text = render(facts)
    data = ModelCard(text).data
    assert (data.language, data.license, data.library_name) == (["ja", "no"], "cc-by-4.0", "transformers")
    assert data.pipeline_tag == "text-generation"
    for words in (
        "1,234,567", "| train | 12 | 3,456 |", "2.2500 (step 100)", "`lr` | 0.001", "2e-06", 'name = "me/first"',
    ):  # fmt: skip
        assert words in text, words


def test_the_snippet_is_python(facts: dict[str, Any]) -> None:
    snippet = render(facts).partition("```python\n")[2].partition("```")[0]
    assert 'tokenizer("吾輩は"' in snippet
    # Behind an upload the same stands in one line, whatever the prompt holds.
    prompt = facts["samples"][0]["prompt"] = 'it\'s "so" $HOME\n'
    snippet = render(facts).partition("```python\n")[2].partition("```")[0]
    line = "; ".join(card.usage(facts["model"], "me/first", prompt))
    assert ast.dump(ast.parse(line)) == ast.dump(ast.parse(snippet))
    assert "pipeline" not in snippet


def test_what_is_not_known_is_not_claimed(facts: dict[str, Any]) -> None:
    facts["data"] = {}
    facts["training"]["curve"]["loss"] = []
    facts["samples"] = []
    text = render(facts)
    for words in ("## Data", "validation", "metrics.jsonl", "## Samples"):
        assert words not in text


def test_names_settings_and_texts_of_others_are_no_markup(facts: dict[str, Any]) -> None:
    nasty = "x](javascript:1)<script>alert(1)</script>\n---\n| `a` ![b](http://t/p.png) \u202e\udcff"
    facts["data"]["sources"] = [{**facts["data"]["sources"][0], "name": nasty}]
    facts["training"]["init_from"] = facts["training"]["settings"]["order"] = nasty
    facts["training"]["teachers"] = [nasty, nasty]
    facts["samples"] = [dict.fromkeys(("prompt", "greedy", "sampled"), nasty[:-1] + "\n```\n# <b>")]
    text = card.render(facts, name=f"me/{nasty[:-1]}", language=["ja", nasty[:-1]], license=f"- {nasty[:-1]}")
    assert "mixed with the distance to the teachers" in text
    data = ModelCard(text).data
    assert data.language == ["ja", nasty[:-1]] and data.license == f"- {nasty[:-1]}"
    assert data.tags == ["zerokara", "continued-pretraining"]
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    found = [each for token in parser.parse(ModelCard(text).text) for each in (token, *(token.children or []))]
    kinds = [token.type for token in found]
    assert not {"html_inline", "html_block", "link_open", "image", "hr"} & set(kinds)
    assert (kinds.count("heading_open"), kinds.count("bullet_list_open"), kinds.count("code_block")) == (8, 1, 2)
    assert len(re.findall("(?m)^[|].*[|]$", text)) == kinds.count("tr_open") + kinds.count("table_open")
    text.encode("utf-8")


@pytest.fixture
def finetuned(facts: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Facts as step 7 leaves them, of a model that converses."""
    train = SplitCounts(9000, cut=40, dropped=12, bad=7, tokens=123456, learned_tokens=4321, cut_learned_tokens=56)
    counts = {"train": train, "test": SplitCounts(500, dropped=3)}
    others = {"majority": 0.335, "character 3-grams": 0.861}
    made = FinetuneFacts(
        task="text label", name="reviews.tsv", data=counts, metric="macro_f1", init_from="me|base",
        test=finetuning.MetricResult(0.8712, 0.851, 0.8899, 500, "global_step30"), baselines=others,
    )  # fmt: skip
    write_json(tmp_path / finetuning.NAME, asdict(made))
    assert read(tmp_path) == made
    facts["model"]["converses"] = True
    facts["proof"]["chat"] = {"compared": 700}
    return facts | {"finetuning": asdict(made)}


def test_a_fine_tuned_model_tells_its_task_its_data_and_how_it_is_asked(finetuned: dict[str, Any]) -> None:
    asked = {"prompt_template": "Review: {input}\nVerdict:\n", "label_words": {"0": "bad*", "1": "good"}}
    finetuned["finetuning"] |= asked | {"system_prompt": "Be <brief>."}
    finetuned["model"]["system_prompt"] = "Be <brief>."
    text = render(finetuned)
    for words in (
        "me\\|base on 9,040 examples of reviews.tsv (text label).", "| train | 9,000 | 40 | 12 | 7 | 123,456 |",
        "| majority | 33.50% |",
        "| **this model** | 87.12% | 85.10% to 88.99% |", card.inline(json.dumps(asked["prompt_template"])),
        "0: bad\\*, 1: good", '[{"role": "system", "content": "Be <brief>."}, {"role": "user", ',
    ):  # fmt: skip
        assert words in text, words
    assert "pretrained from scratch" not in text


def test_the_hub_reads_the_result(finetuned: dict[str, Any]) -> None:
    text = render(finetuned)
    data = ModelCard(text).data
    assert data.tags == ["zerokara", "fine-tuned", "conversational"] and data.model_name == "first"
    (result,) = data.eval_results or []
    where = (result.task_type, result.dataset_name, result.dataset_split)
    assert where == ("text-generation", "reviews.tsv", "test")
    assert (result.metric_type, result.metric_value) == ("macro_f1", 87.12), "as step 8 writes it"
    assert "95 % interval 85.1 to 88.99" in str(result.metric_name)
    snippet = text.partition("```python\n")[2].partition("```")[0]
    assert ast.parse(snippet) and 'apply_chat_template([{"role": "user", "content": "吾輩は"}]' in snippet
    # A loss has no interval, and without a test nothing is claimed.
    test = {"value": 1.23456, "low": None, "high": None, "num_examples": 500, "checkpoint": "global_step30"}
    finetuned["finetuning"] |= {"test": test, "baselines": {}, "metric": "loss"}
    assert "| **this model** | 1.2346 |" in render(finetuned)
    finetuned["finetuning"] |= {"test": None}
    assert not ModelCard(render(finetuned)).data.eval_results


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"task": 1}', '{"data": {"train": {"kept": 1, "odd": 2}}, "test": null}']
)
def test_facts_of_another_form_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "finetune.json").write_text(content, encoding="utf-8")
    (tmp_path / "run.json").touch()
    assert fault_of(read, tmp_path).where == str(tmp_path / "finetune.json")


def test_a_model_that_was_not_begun_from_scratch_says_so(facts: dict[str, Any], finetuned: dict[str, Any]) -> None:
    facts["training"]["init_from"] = "Llama 3"
    text = render({**facts, "finetuning": None})
    assert "pretrained further, from Llama 3, on" in text and "scratch" not in text
    assert ModelCard(text).data.tags == ["zerokara", "continued-pretraining", "conversational"]


def test_another_programs_file_of_that_name_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "finetune.json").write_text('{"epochs": 3}', encoding="utf-8")
    assert read(tmp_path) is None
