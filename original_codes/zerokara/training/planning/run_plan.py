"""The plan of a run: all that is known before training starts, its checks and its table, without torch.

The launching process makes it once, finding every fault in under a second, resolves each `auto`, and writes it to a
file. The training processes get only that file: they read it (`read_plan`), and open it (`training.run`).
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from zerokara.base import resources
from zerokara.base.durable import write_json
from zerokara.base.errors import Fault, RunError, UserError, refuse
from zerokara.base.manifest import Manifest
from zerokara.base.progress import bytes_text, first_of
from zerokara.config.deepspeed_template import load_template
from zerokara.config.engine import ScheduleSettings
from zerokara.config.pretrain_config import PretrainConfig, RunConfig, TeacherSettings
from zerokara.config.settings import Origin
from zerokara.huggingface import model_folder
from zerokara.model.shapes import ModelShape
from zerokara.samples.batches import ValidationBatches, validation_batches
from zerokara.samples.objective import Objective, beginnings, objective
from zerokara.samples.packed_examples import Pairs
from zerokara.samples.packed_tokens import DataPlan
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.hugging_face import encoder_of
from zerokara.tokens.indexed import IndexedTokens, TokenPaths, bin_path, check_belongs, open_splits
from zerokara.training.compute import optimizer_rules
from zerokara.training.compute.engine_choice import for_machines
from zerokara.training.planning import recipe, schedule
from zerokara.training.planning.memory import MemoryForecast
from zerokara.training.planning.processors import Devices
from zerokara.training.planning.schedule import Consumption, Schedule

PLAN_NAME = "plan.json"
"""In a run folder: the plan of its newest start."""
LENGTH_AND_RATE = {*ScheduleSettings.model_fields, *TeacherSettings.model_fields, "optimizer"} - {"output_model_dir"}
"""Settings by which a run becomes longer or shorter, or learns at another rate or from other models; the rest are part
of its identity."""
_CHECKED_IDS = 1 << 20  # at the beginning, and at the end of the data
_COUNTED_DOCUMENTS = 100_000  # whose lengths are looked at


@dataclass(frozen=True)
class PlannedData:
    training: DataPlan  # the training samples and their order
    objective: Objective | Pairs  # turns samples into model inputs and targets
    validation_batches: Callable[[Path, int | None], ValidationBatches]
    """Opens the batches of token files, given their prefix and a maximum number of tokens."""
    sha256: str  # of the training data, by which a run recognises them
    valid_sha256: str  # of the validation data; empty without any
    valid_prefix: Path  # of the .bin and .idx of the validation tokens, which need not exist
    ids: NDArray[Any]  # of the training tokens, on disk
    num_valid_tokens: int
    examples: recipe.Examples | None = None
    plan_rows: tuple[tuple[str, str], ...] = ()  # further ones, by name
    run_files: Mapping[str, str] = field(default_factory=dict)  # texts for the run folder, by file name


@dataclass(frozen=True)
class RunTask:
    """Purpose of a run: pretraining (below), or fine-tuning (defined in `finetuning.task`)."""

    title: str
    config_class: type[RunConfig]
    data_of: Callable[[Any, Encoder], PlannedData]
    """Opens the data that the settings name."""
    worker: str
    """Module of the training process."""
    saves_every_best: bool = False
    """True if `keep_best` saves each time a validation finds a better model, and not only at `save_interval`."""
    finish: Callable[[Any, Any, Path], list[tuple[str, str]]] = lambda plan, commands, newest: []
    """Called with plan, commands and newest checkpoint of a finished run; returns rows of its summary."""


def of_corpus(config: PretrainConfig, encoder: Encoder) -> PlannedData:
    """Open the token files that step 2 has made.

    Raises:
        UserError: they are missing or were made with another tokenizer; the tokenizer lacks what is needed; the corpus
            is shorter than one sequence; the weights or the stages do not fit the sources.
    """
    tokens = check_belongs(config.output_prefix, encoder.sha256)
    training, notes = DataPlan.from_config(config), [*origin_notes(config, tokens)]
    start = tokens.facts.get("start_id", -1)
    if start != encoder.start_id:  # token files of an earlier version have none
        rule = f"the documents begin without {encoder.pieces[encoder.start_id]}, which the tokenizer puts before a text"
        notes.append(("note", f"{rule}: step 2 with --redo adds it, for a new run"))
    if unread := config.without_effect:
        notes.append(("note", f"without effect with architecture {config.architecture}: {', '.join(unread)}"))
    encoder.start_id = start
    turns = objective(config, encoder, config.seed, config.intra_document_masking)
    parts = [source.num_valid_tokens for source in (*training.sources, *training.held_out) if source.num_valid_tokens]
    # The manifest of step 2 has the hashes of both .bin, training first: known without reading gigabytes.
    hashes = [one.sha256 for each in tokens.outputs.values() for one in each if one.path.endswith(".bin")]
    train, valid = open_splits(config.output_prefix)
    return PlannedData(
        training=training,
        objective=turns,
        validation_batches=lambda at, most: validation_batches(at, turns, encoder.before_text, most, parts),
        sha256=hashes[0],
        valid_sha256="".join(hashes[1:]),
        valid_prefix=TokenPaths(config.output_prefix).valid,
        ids=train.tokens,
        num_valid_tokens=len(valid.tokens) if valid is not None else 0,
        plan_rows=(*notes, *length_notes(config.seq_len, train)),
    )


def origin_notes(config: PretrainConfig, tokens: Manifest) -> Iterator[tuple[str, str]]:
    """Yield rows for the plan where step 2 read or split a corpus otherwise than is set now, or its files changed."""
    entries, now = [source["entry"] for source in tokens.facts.get("sources", ())], config.model_dump(mode="json")
    num = len(tokens.settings.get("input_jsonl (number of files of each entry)", entries))
    then = tokens.settings | ({"input_jsonl": entries[:num], "valid_jsonl": entries[num:]} if entries else {})
    if others := [key for key, value in then.items() if now.get(key, value) != value]:
        made = f"step 2 made the tokens of {first_of(entries, 3)}, with another {' and another '.join(others)}"
        yield "note", f"{made}; if what is set now is meant, run step 2 again"
    path = bin_path(TokenPaths(config.output_prefix).train)
    if path.stat().st_mtime_ns not in (one.modified_ns for one in tokens.outputs["tokens"]):
        yield "note", f"{path} was copied or changed since step 2 made it; run step 2 again to find out which"


def length_notes(seq_len: int, train: IndexedTokens) -> Iterator[tuple[str, str]]:
    """Yield a row for the plan where documents are far shorter than a sequence, with the length that fits them."""
    lengths = np.sort(train.lengths[:: max(1, len(train) // _COUNTED_DOCUMENTS)]).astype(np.int64)
    most = int(lengths[np.searchsorted(lengths.cumsum(), 0.95 * lengths.sum())])
    if seq_len > 8 * most:
        fitting = f"seq_len: {1 << (most - 1).bit_length()} holds them"
        yield "note", f"seq_len is {seq_len:,}, and 19 of 20 tokens are in documents of at most {most:,}; {fitting}"


PRETRAINING = RunTask("step 3 train", PretrainConfig, of_corpus, "zerokara.training.worker")


@dataclass(frozen=True)
class RunPlan:
    """A run, ready to be opened."""

    resolved: RunConfig
    """Settings with `precision` resolved, and `micro_batch_size` once it is chosen."""
    requested: RunConfig
    """Settings of the user, with the values of the `recipe`."""
    encoder: Encoder
    data: PlannedData
    requested_template: dict[str, Any]
    """DeepSpeed settings of the user."""
    num_processes: int
    nodes: int = 1
    """Machines, with equally many of the processes."""
    devices: Devices = field(default_factory=Devices)
    """Devices of this machine; a CPU until `auto_settings.on_this_machine` has looked."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Reasons of the recipe's values, by setting."""
    initial_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the run's first start, as JSON, with the values of the `recipe`."""
    task: RunTask = PRETRAINING

    @cached_property
    def shape(self) -> ModelShape:
        return ModelShape.from_config(self.resolved, self.encoder.vocab_size)

    @cached_property
    def schedule(self) -> Schedule:
        return Schedule.from_config(self.resolved, *schedule.extent_of(self.data.training))

    @cached_property
    def consumption(self) -> Consumption:
        """Tokens and epochs that the run takes of each source."""
        return schedule.consumption(self.data.training, self.schedule)

    @property
    def template(self) -> dict[str, Any]:
        """The DeepSpeed settings that are not ours, for these processes."""
        return for_machines(self.requested_template, self.resolved, self.num_processes, self.nodes)

    @property
    def run_dir(self) -> Path:
        return Path(self.resolved.output_model_dir)

    @property
    def processes_per_node(self) -> int:
        return self.num_processes // self.nodes

    @property
    def data_parallel_size(self) -> int:
        """Data-parallel ranks, which share the global batch."""
        return self.num_processes // self.resolved.tensor_parallel_size

    @property
    def checkpoint_bytes(self) -> int:
        """Size of one checkpoint on disk."""
        return optimizer_rules.checkpoint_bytes(self.resolved.optimizer_name, self.shape)

    @cached_property
    def memory(self) -> MemoryForecast:
        """Memory that this run needs, and memory that was free when this was first asked for."""
        main, gpu = resources.available_memory(self.processes_per_node), self.devices.gpu_bytes
        taught = 0
        for each in self.resolved.teachers:
            stored = model_folder.tensors(Path(each), partial(self.teacher_fault, each, "teachers"))
            taught += sum(math.prod(tensor.shape) for tensor in stored.values())
        processes = self.num_processes, self.nodes
        return MemoryForecast(self.resolved, self.shape, *processes, self.template, main, gpu, taught)

    @property
    def max_checkpoints(self) -> int:
        """Largest number of checkpoints that exist at once."""
        config, num_steps, interval = self.resolved, self.schedule.num_steps, self.resolved.save_interval
        if self.task.saves_every_best and config.keep_best:  # each validation that finds a better one saves it
            interval = min(interval, config.eval_interval)
        # One more than is kept: an old one is deleted only when the new one is whole.
        standing = config.keep_last + 1 + (1 if config.keep_best and self.data.num_valid_tokens else 0)
        standing += num_steps // math.lcm(config.keep_every, interval) if config.keep_every else 0
        return min(-(-num_steps // interval), standing)

    def teacher_fault(self, folder: str, key: str, rule: str, remedy: str = "") -> Fault:
        """Return a fault of the teacher in `folder`; all after it as `from_hf.SettingFault`."""
        if key == "input_tokenizer_file":
            return self.requested.fault(key, rule, "a teacher needs the tokenizer of the model that it teaches")
        return self.requested.fault("teachers", f"{folder}: {rule}", remedy)

    def faults(
        self, existing_checkpoints: int = 0, trained_seconds: float = 0.0, convert_command: str = ""
    ) -> Iterator[Fault]:
        """Check the tokenizer, the ids of the data, the space on the disk, and the limits of time and epochs.

        `existing_checkpoints` and `trained_seconds` are those of earlier starts; `convert_command` converts the newest.
        """
        if schedule.has_reached_max_hours(self.requested, trained_seconds):
            rule = f"the run has been trained for {trained_seconds / 3600:.3g} hours already, its limit"
            remedy = f"{schedule.RAISE}; or take what is there: {convert_command}"
            yield self.requested.fault("max_hours", rule, remedy)
        yield from schedule.epochs_faults(self.requested, self.consumption.sources)
        config, each, standing = self.resolved, self.checkpoint_bytes, self.max_checkpoints
        needed, free = max(0, standing - existing_checkpoints) * each, resources.free_bytes(self.run_dir)
        if needed > free:
            rule = f"leaves no room for its checkpoints: {standing} of {bytes_text(each)} will stand at once and need "
            rule += f"{bytes_text(needed)} more, {bytes_text(free)} are free"
            room = existing_checkpoints + free // each
            fitting = "not even one checkpoint fits"
            if room:  # so few saves that all of them may stay
                interval = -(-self.schedule.num_steps // room)
                fitting = f"save_interval: {interval} fits, with keep_every: 0 and keep_best: false"
            yield config.fault("output_model_dir", rule, f"make room, or choose another disk; {fitting}")
        forced = config.traits.tokenizer_class
        if forced and self.encoder.library != "tokenizers" and not existing_checkpoints:
            why = f"transformers opens it as {forced}, which differs"
            rule = f"cannot be exported with a SentencePiece tokenizer: {why}"
            remedy = "choose qwen3 or llama, or the tokenizer.json of the model that you continue"
            yield config.fault("architecture", rule, remedy, ["input_tokenizer_file"])
        ends = (self.data.ids[:_CHECKED_IDS], self.data.ids[-_CHECKED_IDS:])
        largest = max(int(part.max(initial=0)) for part in ends)
        if largest >= self.encoder.vocab_size:
            rule = f"holds the id {largest}; the tokenizer has {self.encoder.vocab_size} pieces"
            yield Fault(f"{self.data.training.prefix}.bin", rule, remedy="run step 2 again with --redo")

    def with_settings(self, **chosen: Any) -> "RunPlan":
        """Return this plan with further settings resolved."""
        return replace(self, resolved=self.resolved.model_copy(update=chosen))

    def on_processes(self, num_processes: int, nodes: int | None = None) -> "RunPlan":
        """Return this plan for other processes, on as many machines as before or on `nodes`.

        Raises:
            UserError: the global batch cannot be shared among the processes, or a matrix among those of a machine; the
                template states another hierarchy.
        """
        config, nodes = self.requested, nodes or self.nodes
        here = num_processes // nodes
        refuse(config.batch_faults(num_processes))
        for_machines(self.requested_template, config, num_processes, nodes)  # or its error, before anything starts
        if nodes > 1 and here % config.tensor_parallel_size:
            why = "it communicates in every layer, within one machine"
            rule = f"must divide the {here} processes of each machine: {why}"
            raise UserError(config.fault("tensor_parallel_size", rule, f"try {here}, or a divisor of it"))
        return replace(self, num_processes=num_processes, nodes=nodes)

    def write(self, path: Path, table: Sequence[tuple[str, str]] = ()) -> None:
        """Write the plan to a file, as JSON: the settings, the hashes of its inputs, and its `table` for a reader."""
        origin = self.requested._origin
        values = {key: value for key, value in origin.values.items() if key in LENGTH_AND_RATE}
        content = {
            "resolved": self.resolved.model_dump(mode="json"),
            "requested": self.requested.model_dump(mode="json"),
            "initial_settings": self.initial_settings,
            "origin": {**vars(origin), "overridden": sorted(origin.overridden), "values": values},
            "recipe": dict(self.reasons),
            "num_processes": self.num_processes,
            "nodes": self.nodes,
            "devices": asdict(self.devices),
            "deepspeed_template": self.requested_template,
            "tokenizer_sha256": self.encoder.sha256,
            "data_sha256": self.data.sha256,
            "code_sha256": code_sha256(),
            "table": table,
        }
        write_json(path, content)


def code_sha256() -> str:
    """Hash of the code of this package: processes that start again, days later, must not run other code."""
    root, code = Path(__file__).resolve().parents[2], hashlib.sha256()
    for name in sorted(glob("**/*.py", root_dir=root, recursive=True)):  # no hidden ones, as those of editors
        code.update(f"{name}\0".encode() + (root / name).read_bytes())
    return code.hexdigest()


def read_plan(path: Path, task: RunTask = PRETRAINING) -> RunPlan:
    """Read a plan of a task that `RunPlan.write` wrote, and open its tokenizer and its data.

    Raises:
        RunError: the tokenizer, the token files or the code were replaced since.
        UserError: they are gone.
    """
    content = orjson.loads(path.read_bytes())
    origin = Origin(**{**content["origin"], "overridden": frozenset(content["origin"]["overridden"])})
    texts = (orjson.dumps(content[name]) for name in ("resolved", "requested"))
    config, requested = map(task.config_class.model_validate_json, texts)
    config._origin = requested._origin = origin
    encoder = encoder_of(config)
    data = task.data_of(config, encoder)
    for key, what, now in (
        ("tokenizer_sha256", config.input_tokenizer_file, encoder.sha256),
        ("data_sha256", config.output_prefix, data.sha256),
        ("code_sha256", "zerokara", code_sha256()),
    ):
        if content[key] != now:
            raise RunError(f"{what}: was replaced after the run was planned; start it again")
    template, num_processes, nodes = (content[key] for key in ("deepspeed_template", "num_processes", "nodes"))
    devices = Devices(**content["devices"])
    reasons, initial = content["recipe"], content["initial_settings"]
    return RunPlan(config, requested, encoder, data, template, num_processes, nodes, devices, reasons, initial, task)


def _held_out_beginnings(data: PlannedData, encoder: Encoder) -> tuple[str, ...]:
    """Return prompts from three validation documents, at equal distances; none where nothing was held out."""
    if not data.num_valid_tokens:
        return ()
    tokens = IndexedTokens(data.valid_prefix)
    ids = (tokens[len(tokens) * third // 3][:64].tolist() for third in range(3))
    return beginnings(map(encoder.decode, ids), has_span=data.objective.lengths.num_noise_tokens > 0)


def make_plan(
    requested: RunConfig,
    initial_settings: Mapping[str, Any] | None = None,
    nodes: int = 1,
    task: RunTask = PRETRAINING,
) -> RunPlan:
    """Plan a run from its configuration, the tokenizer and the token files.

    It is for the configured processes, where they are `auto` for the fewest on each of the `nodes`. `initial_settings`
    are those of a run that is resumed (`EarlierRun`).

    Raises:
        UserError: the DeepSpeed template, the tokenizer or the data is missing or wrong; the processes cannot share the
            global batch or the vocabulary; the settings do not go with the recipe or the schedule.
    """
    here = requested.tensor_parallel_size if requested.num_processes == "auto" else requested.num_processes
    num_processes = nodes * here
    template = load_template(requested.deepspeed_template)
    encoder = encoder_of(requested)
    data = task.data_of(requested, encoder)
    shape = ModelShape.from_config(requested, encoder.vocab_size)
    extent = schedule.extent_of(data.training)
    requested, reasons = recipe.resolve(
        requested, shape, lambda given: schedule.num_samples(given, *extent), initial_settings, data.examples, extent[1]
    )
    if requested.sample_prompts == "auto":
        requested = requested.model_copy(update={"sample_prompts": _held_out_beginnings(data, encoder)})
        reasons["sample_prompts"] = "beginnings of held-out documents"
    if requested.model_size and "auto" not in (requested.num_layers, requested.hidden_size, requested.num_attn_heads):
        reasons["model_size"] = "describes nothing: num_layers, hidden_size and num_attn_heads are numbers"
    refuse(requested.batch_faults(num_processes))
    initial, machines = initial_settings or requested.model_dump(mode="json"), (num_processes, nodes, Devices())
    plan = RunPlan(requested, requested, encoder, data, template, *machines, reasons, initial, task)
    if plan.shape.padded_vocab_size % requested.tensor_parallel_size:
        rows = f"{plan.shape.padded_vocab_size}, the {encoder.vocab_size} pieces of the tokenizer and their padding"
        raise UserError(requested.fault("tensor_parallel_size", f"must divide {rows}", "try a power of two"))
    _ = plan.schedule  # its faults belong to the planning
    return plan
