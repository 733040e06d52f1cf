"""The plan of a run: everything that is known before training starts, worked out in one place and without torch.

The launching process makes it once, finding every fault in under a second, resolves each `auto`, and writes it to a
file. The training processes get that file and nothing else: they read it (`read_plan`), and open it (`training.run`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson
from numpy.typing import NDArray

from zerokara import resources
from zerokara.config.pretrain_config import PretrainConfig, RunConfig
from zerokara.config.settings import Origin
from zerokara.durable import write_json
from zerokara.errors import RunError, UserError
from zerokara.model.shapes import ModelShape
from zerokara.samples.data_plan import DataPlan
from zerokara.samples.objective import Objective, beginnings, objective
from zerokara.samples.packed_examples import ExampleBatches, Pairs, Reading
from zerokara.samples.validation_batches import DocumentBatches, SampleBatches, validation_batches
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokens.indexed import IndexedTokens, TokenPaths, check_belongs, entropy, idx_path, token_counts
from zerokara.training.compute import optimizers
from zerokara.training.compute.updater import load_template, with_hierarchy
from zerokara.training.planning import recipe
from zerokara.training.planning.memory import MemoryForecast
from zerokara.training.planning.processors import Devices
from zerokara.training.planning.schedule import Consumption, Schedule, consumption, extent_of, num_samples

PLAN_NAME = "plan.json"
"""In a run folder: the plan of its newest start."""


@dataclass(frozen=True)
class PlannedData:
    """The data of a run."""

    reading: Reading
    """The training samples and their order."""
    objective: Objective | Pairs
    """Turns samples into model inputs and targets."""
    validation_batches: Callable[[Path, int | None], DocumentBatches | SampleBatches | ExampleBatches]
    """Opens the batches of token files, or of their first tokens, so many at most."""
    sha256: str
    """One hash for the training data, by which a run knows them again."""
    valid_sha256: str
    """The same of the validation data; empty without any."""
    train_prefix: Path
    """Prefix of the .bin and .idx of the training tokens."""
    valid_prefix: Path
    """The same of the validation tokens, which need not be there."""
    ids: NDArray[Any]
    """Those of the training tokens, as they lie on disk."""
    num_train_tokens: int
    num_valid_tokens: int
    unigram_entropy: float
    """Nats per token of a model that knows only the frequency of each predicted token: the baseline of the loss."""
    plan_rows: tuple[tuple[str, str], ...] = ()
    """Further rows of the plan, by name."""
    run_files: Mapping[str, str] = field(default_factory=dict)
    """Texts that belong into the run folder, by file name."""


def baseline_text(unigram_entropy: float) -> str:
    """Return the loss below which a model has learned more than token frequencies, for display."""
    return f"{unigram_entropy:.3f} nats per token: the unigram entropy, the loss of knowing token frequencies alone"


@dataclass(frozen=True)
class Task:
    """What a run is for. Pretraining is one; a room above adds its own."""

    title: str
    """What the step is called at the head of its plan."""
    config_class: type[RunConfig]
    data_of: Callable[[Any, Encoder], PlannedData]
    """Opens the data that such settings name."""
    worker: str
    """The module that is run as a training process."""
    saves_every_best: bool = False
    """Whether `keep_best` saves each time a validation finds a better model, and not only at `save_interval`."""
    finish: Callable[[Any, Any, Path], list[tuple[str, str]]] = lambda plan, commands, newest: []
    """Called with the plan, the commands of the step and the newest checkpoint of a finished run; returns rows of its
    summary."""


def of_corpus(config: PretrainConfig, encoder: Encoder) -> PlannedData:
    """Open the token files that step 2 has made.

    Raises:
        UserError: they are missing or were made with another tokenizer; the tokenizer lacks what is needed; the corpus
            is shorter than one sequence; the weights or the stages do not fit the sources.
    """
    paths = TokenPaths(config.output_prefix)
    tokens = check_belongs(config.output_prefix, encoder.sha256)
    reading = DataPlan.from_config(config, config, config.lengths, config.seed)
    made = objective(config, encoder, config.seed, config.intra_document_masking)
    parts = [source.num_valid_tokens for source in reading.sources if source.num_valid_tokens]
    # The manifest of step 2 has the hashes of both .bin, training first: known without reading gigabytes.
    hashes = [one.sha256 for each in tokens.outputs.values() for one in each if one.path.endswith(".bin")]
    index, is_validated = IndexedTokens(paths.train), idx_path(paths.valid).exists()
    return PlannedData(
        reading=reading,
        objective=made,
        validation_batches=lambda prefix, most: validation_batches(prefix, made, encoder.eos_id, most, parts),
        sha256=hashes[0],
        valid_sha256="".join(hashes[1:]),
        train_prefix=paths.train,
        valid_prefix=paths.valid,
        ids=index.tokens,
        num_train_tokens=reading.tokens(where=config.where("seq_len")).num_tokens,
        num_valid_tokens=len(IndexedTokens(paths.valid).tokens) if is_validated else 0,
        unigram_entropy=entropy(made.target_counts(token_counts(index))),
    )


PRETRAINING = Task("step 3 train", PretrainConfig, of_corpus, "zerokara.training.worker")


@dataclass(frozen=True)
class RunPlan:
    """A run, ready to be opened."""

    resolved: RunConfig
    """The settings; `precision` is resolved, and `micro_batch_size` once it is chosen."""
    requested: RunConfig
    """The settings as the user gave them, with the `recipe` in place of its `auto`."""
    encoder: Encoder
    data: PlannedData
    requested_template: dict[str, Any]
    """The user's DeepSpeed settings."""
    num_processes: int
    nodes: int = 1
    """Machines, with equally many of the processes."""
    devices: Devices = field(default_factory=Devices)
    """What this machine computes on; a CPU until `launching.on_this_machine` has looked."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """What the recipe chose, and why."""
    task: Task = PRETRAINING

    @cached_property
    def shape(self) -> ModelShape:
        """The model."""
        return ModelShape.from_config(self.resolved, self.encoder.vocab_size)

    @cached_property
    def schedule(self) -> Schedule:
        """Length and learning rate."""
        return Schedule.from_config(self.resolved, *extent_of(self.data.reading))

    @cached_property
    def consumption(self) -> Consumption:
        """Tokens and epochs that the run takes of each source."""
        return consumption(self.data.reading, self.schedule)

    @property
    def template(self) -> dict[str, Any]:
        """The DeepSpeed settings that are not ours, for these processes."""
        return with_hierarchy(self.requested_template, self.resolved, self.num_processes, self.nodes)

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return Path(self.resolved.output_model_dir)

    @property
    def processes_per_node(self) -> int:
        """The processes of one machine."""
        return self.num_processes // self.nodes

    @property
    def data_parallel_size(self) -> int:
        """Data-parallel ranks, which share the global batch."""
        return self.num_processes // self.resolved.tensor_parallel_size

    @property
    def checkpoint_bytes(self) -> int:
        """Size of one checkpoint on disk."""
        return optimizers.checkpoint_bytes(self.resolved.optimizer_name, self.shape)

    @cached_property
    def memory(self) -> MemoryForecast:
        """The memory that this run needs, against what is there, and was free when this was first asked for."""
        main, gpu = resources.available_memory(self.processes_per_node), self.devices.gpu_bytes
        return MemoryForecast(self.resolved, self.shape, self.num_processes, self.nodes, self.template, main, gpu)

    @property
    def memory_alone(self) -> MemoryForecast:
        """The same, against what there would be if nothing else ran on the machine."""
        return replace(self.memory, main_bytes=resources.total_memory(self.processes_per_node))

    def with_settings(self, **chosen: Any) -> RunPlan:
        """The same plan with these settings resolved."""
        return replace(self, resolved=self.resolved.model_copy(update=chosen))

    def on_processes(self, num_processes: int, nodes: int | None = None) -> RunPlan:
        """The same plan for other processes, on as many machines as before or on `nodes`.

        Raises:
            UserError: the global batch cannot be shared among the processes, or a matrix among those of a machine; the
                template states another hierarchy.
        """
        config, nodes = self.requested, nodes or self.nodes
        here = num_processes // nodes
        if faults := list(config.batch_faults(num_processes)):
            raise UserError(faults)
        with_hierarchy(self.requested_template, config, num_processes, nodes)  # or its error, before anything starts
        if nodes > 1 and here % config.tensor_parallel_size:
            why = "it communicates in every layer, within one machine"
            rule = f"must divide the {here} processes of each machine: {why}"
            raise UserError(config.fault("tensor_parallel_size", rule, f"try {here}, or a divisor of it"))
        return replace(self, num_processes=num_processes, nodes=nodes)

    def write(self, path: Path) -> None:
        """Write the plan to a file, as JSON: what was chosen, and what its inputs are recognised by."""
        origin = self.requested._origin
        content = {
            "resolved": self.resolved.model_dump(mode="json"),
            "requested": self.requested.model_dump(mode="json"),
            "origin": {"path": origin.path, "lines": origin.lines, "overridden": sorted(origin.overridden)},
            "recipe": dict(self.reasons),
            "num_processes": self.num_processes,
            "nodes": self.nodes,
            "devices": asdict(self.devices),
            "deepspeed_template": self.requested_template,
            "tokenizer_sha256": self.encoder.sha256,
            "data_sha256": self.data.sha256,
        }
        write_json(path, content)


def read_plan(path: Path, task: Task = PRETRAINING) -> RunPlan:
    """Read a plan of a task that `RunPlan.write` wrote, and open its tokenizer and its data.

    Raises:
        RunError: the tokenizer or the token files were replaced since.
        UserError: they are gone.
    """
    content = orjson.loads(path.read_bytes())
    origin = Origin(**{**content["origin"], "overridden": frozenset(content["origin"]["overridden"])})
    texts = (orjson.dumps(content[name]) for name in ("resolved", "requested"))
    config, given = map(task.config_class.model_validate_json, texts)
    config._origin = given._origin = origin
    encoder = Encoder(config.input_tokenizer_file)
    data = task.data_of(config, encoder)
    for key, what, now in (
        ("tokenizer_sha256", config.input_tokenizer_file, encoder.sha256),
        ("data_sha256", config.output_prefix, data.sha256),
    ):
        if content[key] != now:
            raise RunError(f"{what}: was replaced after the run was planned; start it again")
    template, num_processes, nodes = (content[key] for key in ("deepspeed_template", "num_processes", "nodes"))
    devices = Devices(**content["devices"])
    return RunPlan(config, given, encoder, data, template, num_processes, nodes, devices, content["recipe"], task)


def _held_out_beginnings(data: PlannedData, encoder: Encoder, has_span: bool) -> tuple[str, ...]:
    """Return prompts from three validation documents, at equal distances; none where nothing was held out."""
    if not data.num_valid_tokens:
        return ()
    tokens = IndexedTokens(data.valid_prefix)
    ids = (tokens[len(tokens) * third // 3][:64].tolist() for third in range(3))
    return beginnings(map(encoder.decode, ids), has_span)


def make_plan(
    given: RunConfig,
    num_processes: int | None = None,
    kept: Mapping[str, Any] | None = None,
    nodes: int = 1,
    task: Task = PRETRAINING,
) -> RunPlan:
    """Plan a run from its configuration, the tokenizer and the token files.

    `num_processes` are those of all `nodes` together, by default the configured ones, where these are `auto` 1 on each
    until `RunPlan.on_processes`. `kept` are the settings with which this run was last started (`run_folder.look`).

    Raises:
        UserError: the DeepSpeed template, the tokenizer or the data (`Task.data_of`) is missing or wrong; the processes
            cannot share the global batch or the vocabulary; the settings do not go with the recipe or the schedule.
    """
    if num_processes is None:
        num_processes = nodes * (1 if given.num_processes == "auto" else given.num_processes)
    template = load_template(given.deepspeed_template)
    encoder = Encoder(given.input_tokenizer_file)
    data = task.data_of(given, encoder)
    shape, samples = ModelShape.from_config(given, encoder.vocab_size), num_samples(given, *extent_of(data.reading))
    given, reasons = recipe.resolve(given, shape, samples, kept)
    if given.sample_prompts == "auto":
        prompts = _held_out_beginnings(data, encoder, given.traits.is_encoder_decoder)
        given = given.model_copy(update={"sample_prompts": prompts})
        reasons["sample_prompts"] = "beginnings of held-out documents"
    if given.model_size and "auto" not in (given.num_layers, given.hidden_size, given.num_attn_heads):
        reasons["model_size"] = "describes nothing: num_layers, hidden_size and num_attn_heads are numbers"
    if faults := list(given.batch_faults(num_processes)):
        raise UserError(faults)
    plan = RunPlan(given, given, encoder, data, template, num_processes, nodes, reasons=reasons, task=task)
    if plan.shape.padded_vocab_size % given.tensor_parallel_size:
        rows = f"{plan.shape.padded_vocab_size}, the {encoder.vocab_size} pieces of the tokenizer and their padding"
        raise UserError(given.fault("tensor_parallel_size", f"must divide {rows}", "try a power of two"))
    _ = plan.schedule  # its faults belong to the planning
    return plan
