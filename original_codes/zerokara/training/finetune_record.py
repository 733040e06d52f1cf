"""The record of a fine-tuning: what it was, what became of its examples, and its test beside simple methods.

``finetune.json`` in the run folder (`examples.facts`): step 7 shows it, and step 4 puts it into the model card. Nothing
here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson

from zerokara.config.finetune_config import FinetuneRunConfig
from zerokara.durable import write_bytes
from zerokara.evaluation import baselines, metrics
from zerokara.evaluation.baselines import Baseline
from zerokara.examples import facts
from zerokara.examples.facts import FinetuneFacts, MetricResult
from zerokara.examples.formats import conversations
from zerokara.examples.preparation import ExampleFiles
from zerokara.examples.reading import find_example_files
from zerokara.examples.token_files import ExampleTokens
from zerokara.progress import count_text, log
from zerokara.tokenizer.encoder import Encoder
from zerokara.training.planning.run_plan import RunPlan

RESULT_NAME = "test_result.json"
ANSWERS_NAME = "test_answers.jsonl"
"""Every test example's reference and answer, for people and for further metrics."""
MAX_CONVERSATIONS = 1_000
MAX_TRAINING_PAIRS = 200_000
"""Training examples from which a baseline learns the forms of words; seconds."""


def write(plan: RunPlan) -> None:
    """Write the record of a finished run."""
    config, examples = plan.config, plan.data.examples
    assert isinstance(config, FinetuneRunConfig) and examples is not None
    splits = {"train": examples.train, "valid": examples.valid, "test": examples.test}
    result = plan.run_dir / RESULT_NAME
    found = orjson.loads(result.read_bytes()) if result.exists() else {}
    test: MetricResult | None = None
    beside: dict[str, float] = {}
    if f"test_{config.metric}" in found and examples.test is not None:
        value, (low, high) = found[f"test_{config.metric}"], found.get(f"test_{config.metric}_interval") or (None, None)
        test = MetricResult(value, low, high, examples.test.num_examples, found["checkpoint"])
        if config.metric != "loss":
            beside = dict(_baselines(examples, config.metric, plan.encoder))
    if examples.data_format == "messages":
        _write_conversations(config, plan.run_dir)
    FinetuneFacts(
        task=examples.data_format.replace("_", " "),
        data={name: split.counts for name, split in splits.items() if split is not None},
        metric=config.metric,
        init_from=Path(config.init_from).name,
        test=test,
        baselines=beside,
    ).write(plan.run_dir)


def _write_conversations(config: FinetuneRunConfig, run_dir: Path) -> None:
    """Keep some of the conversations that were learned: the export is proved on them, too."""
    files = find_example_files(config.train_data, config.where("train_data"))
    found = conversations(config, files, MAX_CONVERSATIONS)
    lines = (orjson.dumps({"messages": messages}, option=orjson.OPT_APPEND_NEWLINE) for messages in found)
    write_bytes(run_dir / facts.CONVERSATIONS_NAME, b"".join(lines))


def summary_rows(run_dir: Path) -> list[tuple[str, str]]:
    """Return the test of a fine-tuning beside simple methods, for people; nothing of another run."""
    made = facts.read(run_dir)
    if made is None:
        return []
    learned = made.data["train"].learned_tokens
    rows = [("examples", f"{made.data['train'].kept + made.data['train'].cut:,}, {count_text(learned)} learned tokens")]
    if made.test is not None:
        test = made.test
        interval = "" if test.low is None or test.high is None else f"95 % {test.low:.4f} to {test.high:.4f}, "
        rows.append(("test", f"{made.metric} {test.value:.4f} ({interval}{test.num_examples:,} examples)"))
        simple = ((name.replace("_", " "), value) for name, value in made.baselines.items())
        rows += [("", f"{made.metric} {value:.4f} by {name}") for name, value in simple]
        if (run_dir / ANSWERS_NAME).exists():
            rows.append(("answers", str(run_dir / ANSWERS_NAME)))
    return rows


def _baselines(examples: ExampleFiles, metric: str, encoder: Encoder) -> Iterator[tuple[str, float]]:
    """The metric of simple methods on the test examples."""
    if examples.data_format == "messages" or examples.test is None:
        return
    log("the same metric of simple methods:")
    lines = [orjson.loads(line) for line in examples.test.records_path.read_bytes().splitlines()]
    sources, references = [line["input"] for line in lines], [line["reference"] for line in lines]
    made: Iterator[Baseline]
    if examples.labels:
        made = iter([Baseline("majority", baselines.majority(references))])
    else:
        made = baselines.for_texts(list(_training_pairs(examples, encoder)), sources)
    for each in made:
        value = metrics.METRICS[metric](each.outputs, references).value
        log(f"  {each.name.replace('_', ' ')}: {metric} {value:.4f}")
        yield each.name, value


def _training_pairs(examples: ExampleFiles, encoder: Encoder) -> Iterator[tuple[str, str]]:
    """What is read, without its template, and the answer of the first training examples."""
    tokens = ExampleTokens(examples.train.prefix)
    before, _, behind = examples.prompt_template.partition("{input}")
    for number in range(min(len(tokens), MAX_TRAINING_PAIRS)):
        answer = encoder.decode(tokens.segments(number)[-1])
        prompt = encoder.decode(tokens.prompt(number))
        yield prompt.removeprefix(before).removesuffix(behind).strip(), answer
