"""Fine-tuning in the launching process: the settings of its run, its examples, the test at its end, and its record.

A fine-tuning is a run like any other, of `FinetuneRunConfig`: the model's settings come from `init_from`, its data are
the prepared examples. At its end the best checkpoint answers the test examples into ``test_result.json`` in the run
folder: once, unless the run was made longer since and another checkpoint is the best, or the test examples are others.
``finetune.json`` (`examples.facts`) records all of it for the model card.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import orjson

from zerokara import checkpoint
from zerokara.base.durable import ASIDE_ENDING, read_back, unused_name, write_json
from zerokara.base.errors import RunError, refuse
from zerokara.base.progress import count_text, log
from zerokara.config.finetune_config import FinetuneConfig, FinetuneRunConfig
from zerokara.config.loading import text_of
from zerokara.config.settings import resolved
from zerokara.corpus.find import public_name
from zerokara.evaluation import baselines, scoring
from zerokara.evaluation.baselines import NamedOutputs
from zerokara.examples import facts, preparation
from zerokara.examples.chat_template import MARK
from zerokara.examples.example_files import ExampleFiles, ExamplePaths, Split, SplitFiles, chosen, prompt_of
from zerokara.examples.facts import CHAT_TEMPLATE_NAME, FinetuneFacts, MetricResult
from zerokara.samples.bin_packing import target_length
from zerokara.samples.packed_examples import ExampleData, PackedExamples, Pairs, pair_lengths
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.hugging_face import encoder_of
from zerokara.tokens.indexed import EXAMPLES_STEP, IndexedTokens
from zerokara.training.launching import Commands
from zerokara.training.planning import recipe
from zerokara.training.planning.run_plan import PlannedData, RunPlan, RunTask
from zerokara.training.spawning import spawn

RESULT_NAME = "test_result.json"
ANSWERS_NAME = "test_answers.jsonl"
"""Reference and answer of every test example, for display and for further metrics."""
MAX_PACKED_LENGTH = 1024
"""Maximum of `packed_length: auto`: longer rows hold more examples, but need a smaller micro batch."""
MAX_PADDING = 0.1
"""Share of padding above which a plan has a warning."""
MIN_VALID_EXAMPLES = 20
"""Validation examples below which a plan has a warning: one of them is 5 % and more of an accuracy."""
MAX_TRAINING_PAIRS = 200_000
"""Maximum training examples from which a baseline learns the forms of words; seconds."""


def prepared(config: FinetuneConfig, redo: bool = False) -> FinetuneRunConfig:
    """Prepare the examples; return the settings of the run, with those of its model. Loads torch.

    Raises:
        UserError: `init_from` holds no model or tokenizer, a setting does not go with the model, or the examples cannot
            be used (with file, line, value and remedy).
    """
    from zerokara.huggingface import from_hf, tokenizer_proof

    folder = Path(config.init_from)
    values: dict[str, Any] = {**config.model_dump(), **from_hf.settings_of(folder, config.fault)}
    if config.input_tokenizer_file == "auto":
        values["input_tokenizer_file"] = from_hf.tokenizer_of(folder, config.fault)
    own = folder / CHAT_TEMPLATE_NAME
    if config.chat_template == "auto" and own.is_file() and MARK.search(text_of(own, "chat_template")):
        values["chat_template"] = str(own)  # also of a SentencePiece model, whose tokenizer is made anew without it
    if config.packed_length == "auto":
        values["packed_length"] = min(values["seq_len"], MAX_PACKED_LENGTH)
    run, length = FinetuneRunConfig(**values, intra_document_masking=True), values["packed_length"]
    run._origin = config._origin
    faults, is_encoder_decoder = list(run.rule_faults(set())), run.traits.is_encoder_decoder
    if not is_encoder_decoder and length > run.seq_len:
        rule = f"is longer than the model's context, {run.seq_len} tokens"
        faults.append(config.fault("packed_length", rule, f"set it to {run.seq_len}, or auto", ["seq_len"]))
    refuse(faults)
    encoder = encoder_of(run)
    load_tokenizer = partial(tokenizer_proof.tokenizer_of_exports, encoder, is_encoder_decoder)
    files = preparation.prepare(run, encoder, load_tokenizer, redo)
    run_dir = Path(config.output_model_dir)
    is_finished = not redo and (run_dir / facts.NAME).exists()
    if is_finished and "test" in files.splits and files.splits["test"].sha256 != _result(run_dir).get("test_sha256"):
        log(f"note: {run_dir} was not tested on these examples; step 8 measures its export on them")
    if is_encoder_decoder:
        pairs = pair_lengths(IndexedTokens(files.train.prefix, EXAMPLES_STEP))
        run = run.model_copy(update={"packed_target_length": target_length(*pairs, length)})
    return run


def data_of(config: FinetuneRunConfig, encoder: Encoder) -> PlannedData:
    files, is_encoder_decoder = ExampleFiles.read(config.output_prefix), config.traits.is_encoder_decoder
    train, valid = files.train, files.splits.get("valid")
    packed = PackedExamples(train.prefix, config.lengths, is_encoder_decoder, encoder.pad_id, config.seed)
    num_valid_tokens = valid.counts.tokens if valid else 0
    of_chat = {}
    if files.chat_template is not None:  # the export is proved on some of the conversations, too
        of_chat[CHAT_TEMPLATE_NAME] = files.chat_template
        of_chat[facts.CONVERSATIONS_NAME] = train.texts_path.read_text(encoding="utf-8")
    training = ExampleData.of_rows(packed, num_valid_tokens, ", ".join(config.train_data))
    return PlannedData(
        training=training,
        objective=Pairs(config.lengths, encoder.pad_id if is_encoder_decoder else None),
        validation_batches=training.validation_batches,
        sha256=train.sha256,
        valid_sha256=valid.sha256 if valid else "",
        valid_prefix=ExamplePaths(config.output_prefix).prefix("valid"),
        ids=IndexedTokens(train.prefix, EXAMPLES_STEP).tokens,
        num_valid_tokens=num_valid_tokens,
        examples=(train.num_examples, train.counts.learned_tokens, len(packed), bool(files.labels)),
        plan_rows=tuple(plan_rows(train, valid, packed)),
        run_files={facts.NAME: orjson.dumps(asdict(facts_of(config, files))).decode(), **of_chat},
    )


def plan_rows(train: SplitFiles, valid: SplitFiles | None, packed: PackedExamples) -> Iterator[tuple[str, str]]:
    """Rows of the plan on the counts of the examples, their learned tokens, and their packing."""
    counts = train.counts
    kept = f"{counts.kept:,} kept, {counts.cut:,} cut, {counts.dropped:,} dropped, {counts.bad:,} bad"
    yield "examples", f"{train.num_examples:,} training examples in {len(packed):,} sequences ({kept})"
    learned, padding = f"{counts.learned_tokens / max(1, counts.tokens):.1%}", f"{packed.padding_share:.1%}"
    yield "", f"{learned} of the tokens are learned, {padding} of what is computed is padding"
    if lost := counts.cut_learned_tokens:
        yield "", f"warning: {lost:,} tokens of answers were cut away with their questions (overlong: cut_prompt)"
    if valid and valid.num_examples < MIN_VALID_EXAMPLES:
        few = f"{valid.num_examples} are fewer than {MIN_VALID_EXAMPLES} (valid_data, valid_fraction)"
        yield "", f"warning: the validation examples choose the checkpoint almost by chance: {few}"
    if packed.padding_share > MAX_PADDING:
        yield "", "warning: much padding; fewer very long answers, or a larger packed_length if the context allows it"


def finish(plan: RunPlan, commands: Commands, newest: Path) -> list[tuple[str, str]]:
    """Test the best checkpoint of a finished run, unless that was done, and write the record; return it as rows.

    Raises:
        RunError: the test failed; the run is complete, and the same command tests again.
    """
    config, run_dir = cast(FinetuneRunConfig, plan.resolved), plan.run_dir
    examples, tested = ExampleFiles.read(config.output_prefix), checkpoint.best(run_dir) or newest
    test, result = examples.splits.get("test"), _result(run_dir)
    is_tested = result.get("checkpoint") == tested.name and result.get("metric", "loss") == config.metric
    if test is not None and not (is_tested and result.get("test_sha256") == test.sha256):
        for name in (RESULT_NAME, ANSWERS_NAME) if result else ():  # of before a longer run
            if (old := run_dir / name).exists():
                old.rename(unused_name(old.with_stem(f"{old.stem}_{result['checkpoint']}"), ASIDE_ENDING))
                log(f"{old.name} of {result['checkpoint']} is kept under another name")
        log(f"{plan.task.title}: reading the {test.num_examples:,} test examples, once, with {tested.name}")
        if code := spawn(plan, "test", str(tested)):
            raise RunError(f"the test ended with exit code {code}; its messages say why. To test: {commands.resume}")
    return _record(plan, config, examples, newest)


def _result(run_dir: Path) -> dict[str, Any]:
    """Result of the test; empty if there is none."""
    path = run_dir / RESULT_NAME
    return read_back(path, "delete it; the test is then done again") if path.exists() else {}


def _record(plan: RunPlan, config: FinetuneRunConfig, examples: ExampleFiles, newest: Path) -> list[tuple[str, str]]:
    """Write ``finetune.json``; return its rows for display, last a warning if the model has learned nothing."""
    splits, metric, test, simple = examples.splits, config.metric, None, dict[str, float]()
    found, answers, learned = _result(plan.run_dir), plan.run_dir / ANSWERS_NAME, examples.train.counts.learned_tokens
    reached, sign = checkpoint.read_state(newest).facts, 1 if metric == "loss" else -1
    tuned = replace(facts_of(config, examples), init_from=Path(reached.get("init_from", config.init_from)).name)
    rows = [("examples", f"{examples.train.num_examples:,}, {count_text(learned)} learned tokens")]
    if "test" in splits and f"test_{metric}" in found:
        value, number = found[f"test_{metric}"], found["test_examples"]
        low, high = found.get(f"test_{metric}_interval") or (None, None)
        test = MetricResult(value, low, high, number, found["checkpoint"])
        interval = "" if low is None else f"95 % {low:.4f} to {high:.4f}, "
        rows.append(("test", f"{metric} {value:.4f} ({interval}{number:,} examples)"))
        if metric != "loss" and examples.data_format != "messages":
            simple = _simple_methods(examples, "test", tuned, plan.encoder, config)
            rows += [("", f"{metric} {value:.4f} by {name.replace('_', ' ')}") for name, value in simple.items()]
        if answers.exists():
            rows.append(("answers", str(answers)))
    write_json(plan.run_dir / facts.NAME, asdict(replace(tuned, test=test, baselines=simple)))
    first, best = reached.get(f"first_valid_{metric}"), reached.get("best_selection_loss")
    if test is None and best is not None and examples.labels and metric != "loss":
        simple = _simple_methods(examples, "valid", tuned, plan.encoder, config)
    value = test.value if test else sign * (best or 0.0) + 0.0  # never -0.0
    better = [f"the {each:.4f} by {name.replace('_', ' ')}" for name, each in simple.items() if each >= value]
    worse = [f"{metric} {value:.4f} is not better than {' and '.join(better)}"] if better else []
    if first is not None and best is not None and best >= sign * first:
        worse.append(f"by validation {sign * best:.4f} is not better than the {first:.4f} before the training")
    if worse:
        remedy = f"try a higher rate, --set lr={3 * resolved(plan.resolved.lr):.2g}"
        if written := [key for key in recipe.OF_EXAMPLES if key not in plan.reasons]:
            remedy = f"leave {' and '.join(written)} at auto"
        what = f"{'; '.join(worse)}: the fine-tuning has taught the model nothing"
        rows.append(("warning", f"{what}; {remedy}, or give it more examples"))
    return rows


def facts_of(config: FinetuneRunConfig, examples: ExampleFiles) -> FinetuneFacts:
    """Return what is known of a fine-tuning before it begins."""
    counts = {str(name): split.counts for name, split in examples.splits.items()}
    task, asked = examples.data_format.replace("_", " "), (config.label_words, config.system_prompt)
    name, data = Path(config.init_from).name, ", ".join(map(public_name, config.train_data))
    return FinetuneFacts(task, counts, config.metric, name, None, {}, examples.prompt_template, data, *asked)


def _simple_methods(
    examples: ExampleFiles, split: Split, tuned: FinetuneFacts, encoder: Encoder, config: FinetuneRunConfig
) -> dict[str, float]:
    """The metric of simple methods on the examples of a split that the model answers, by the name of the method."""
    lines = [orjson.loads(line) for line in examples.splits[split].texts_path.read_bytes().splitlines()]
    number = config.eval_examples if split == "valid" and config.eval_examples != "all" else None
    lines = [lines[each] for each in chosen(len(lines), number, config.seed)]
    references = [line["reference"] for line in lines]
    simple: Iterable[NamedOutputs] = [("majority", baselines.majority(references))]
    if not examples.labels:
        tokens = IndexedTokens(examples.train.prefix, EXAMPLES_STEP)
        pairs = []
        for number in range(min(tokens.num_documents, MAX_TRAINING_PAIRS)):
            segments = tokens.sequences(number)
            source = tuned.input_of(encoder.decode(prompt_of(segments))).strip()
            pairs.append((source, encoder.decode(segments[-1])))
        simple = baselines.for_texts(pairs, [line["input"] for line in lines])
    return {name: scoring.METRICS[tuned.metric](outputs, references).value for name, outputs in simple}


FINETUNING = RunTask(
    title="step 7 finetune",
    config_class=FinetuneRunConfig,
    data_of=data_of,
    worker="zerokara.finetuning.worker",
    saves_every_best=True,
    finish=finish,
)
