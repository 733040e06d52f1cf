"""What earlier starts of a run tell, and whether a plan goes on with it: as the same run, and with which changes.

A run stays the same while its identity does: model shape, data, tokenizer and the order of the samples. Nothing here
prints or reads the run: `run_folder.read_earlier` reads, `launching` shows and refuses.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from zerokara.base import manifest
from zerokara.base.errors import Fault
from zerokara.checkpoint import TrainingState
from zerokara.config.engine import MonitoringSettings
from zerokara.config.writing import overrides
from zerokara.training.planning.run_plan import LENGTH_AND_RATE, RunPlan

PLACES = frozenset({
    "output_model_dir", "input_jsonl", "input_tokenizer_file", "output_prefix", "deepspeed_template", "train_data",
    "valid_data", "test_data", "chat_template", "end_of_document",
})  # fmt: skip
"""Settings that name files, or a token of one: their content is identified by hashes."""
_KEY_NAMES = {
    "tokenizer_sha256": "input_tokenizer_file (SHA-256 of its content)",
    "vocab_size": "input_tokenizer_file (its number of pieces)",
    "data_sha256": "output_prefix (SHA-256 of the token files)",
    "raw_len": "seq_len, noise_density or mean_span_length (tokens of the corpus in a sample)",
    "input_len": "seq_len (input tokens of a sample)",
    "target_len": "seq_len, noise_density or mean_span_length (tokens that a sample predicts)",
    "curriculum": "stages, source_weights or the number of documents in input_jsonl",
}
"""Entries of the identity that are no settings, as the user knows them."""
INIT_FACT = "init_from_weights"
"""The fact of a run's state that is `weights_id` of the model that it began with."""
TEACHERS_FACT = "teacher_weights"
"""Those of the teachers of the last start."""
_DERIVED = {"vocab_size", "raw_len", "input_len", "target_len"}  # reported only where nothing else differs
# Settings whose change is not reported: the content of those files is compared, and step 2's own.
_UNREPORTED = PLACES - {"deepspeed_template"} | {"num_workers"}
# Settings that change nothing in what is trained, and those whose outcome is part of the run's identity.
_MONITORING = {*MonitoringSettings.model_fields, "num_workers", "max_hours"} - {"max_skipped_steps", "spike_sigmas"}
_IN_IDENTITY = {"source_weights", "stages", "max_epochs_per_source", "intra_document_masking"}
WITHOUT_EFFECT = frozenset(_MONITORING | _IN_IDENTITY)
"""Settings that may differ in a run that is finished."""


@dataclass(frozen=True)
class EarlierRun:
    """Earlier starts of a run, by the files in its folder, read once."""

    steps: Sequence[int]  # of its checkpoints, ascending
    state: TrainingState | None  # of the newest checkpoint
    identity: Mapping[str, Any]  # `identity_of` its plan
    plan: Mapping[str, Any]
    """Content of the `RunPlan` of its newest start."""
    ended_at: int | None  # the last step, once the run has ended and while the checkpoint of its end is there

    @property
    def initial_settings(self) -> Mapping[str, Any]:
        """Settings of the run's first start, as JSON; version 1.0.0 recorded those of the newest alone."""
        return dict(self.plan.get("initial_settings", self.plan["requested"]))


class Resumption(NamedTuple):
    """How a plan goes on with an earlier run."""

    faults: list[Fault]
    """Why it cannot."""
    is_finished: bool = False
    """True where the plan ends no later than the run has ended."""
    changed: Mapping[str, tuple[Any, Any]] = {}
    """Settings that differ from the last start's, each with its value then and now."""


def identity_of(plan: RunPlan) -> dict[str, Any]:
    """Return what must not change during a run, as JSON: model shape, data, tokenizer, and the order of the samples."""
    config = plan.resolved
    shape = plan.shape.as_json()
    del shape["init_std"]  # of the first step alone
    return {
        **shape,
        "seed": config.seed,
        "order": config.order,
        "tokenizer_sha256": plan.encoder.sha256,
        "data_sha256": plan.data.sha256,
        "curriculum": plan.data.training.identity(),
        "intra_document_masking": config.intra_document_masking,
    }


def resume_faults(plan: RunPlan, earlier: EarlierRun) -> list[Fault]:
    """Return why a plan cannot go on with an earlier start: it is of another run."""
    config, was, now = plan.requested, dict(earlier.identity), identity_of(plan)
    if _only_longer(was["curriculum"], now["curriculum"]):
        was["curriculum"] = now["curriculum"]
    differing = [name for name in now if was.get(name) != now[name]]
    differing = [name for name in differing if name not in _DERIVED] or differing
    if not differing:
        return []
    rule = "belongs to another run: " + "; ".join(_difference(name, was.get(name), now[name]) for name in differing)
    remedy = "choose another output_model_dir, or use --redo to set that run aside and start over"
    reaches_further = plan.shape.traits.positions == "rotary" and not config.packs_examples
    if reaches_further and "seq_len" in differing and was["seq_len"] < now["seq_len"]:
        remedy += "; for longer sequences finish that run, export it with step 4, and start another output_model_dir "
        remedy += f"with init_from naming that export and seq_len: {now['seq_len']}"
    return [config.fault("output_model_dir", rule, remedy)]


def resumption(plan: RunPlan, earlier: EarlierRun, resume_command: str) -> Resumption:
    """Compare a plan with the run that lies in its folder; `resume_command` is the command of this start."""
    if faults := resume_faults(plan, earlier):
        return Resumption(faults)
    before, now = earlier.plan["requested"], plan.requested.model_dump(mode="json", exclude={*_UNREPORTED})
    changed = {key: (before[key], value) for key, value in now.items() if before.get(key, value) != value}
    began, base = earlier.state and earlier.state.facts.get(INIT_FACT), plan.requested.init_from
    if began and base and weights_id(base) not in ("", began):
        changed["init_from"] = before["init_from"], f"{base}, whose weights are others; a new run would begin with them"
    taught = earlier.state.facts.get(TEACHERS_FACT, ()) if earlier.state and "teachers" not in changed else ()
    pairs = zip(plan.requested.teachers, taught, strict=False)
    if others := [teacher for teacher, weights in pairs if weights_id(teacher) not in ("", weights)]:
        changed["teachers"] = before["teachers"], f"the weights of {', '.join(others)} are others"
    if earlier.ended_at is not None and plan.schedule.num_steps <= earlier.ended_at:
        # What the last start tried by --set was for that start.
        tried = {key for key in earlier.plan["origin"]["overridden"] if not plan.requested.typed(key)}
        effective = {key: values for key, values in changed.items() if key not in tried | WITHOUT_EFFECT}
        if effective:
            rule = f"holds a finished run of other settings: {'; '.join(texts_of(effective))}"
            faults = [plan.requested.fault("output_model_dir", rule, "use --redo to set it aside and train again")]
        return Resumption(faults, is_finished=True)
    faults = [*_length_faults(plan, earlier), *_forgotten_faults(plan, earlier, resume_command)]
    return Resumption(faults, False, changed)


def weights_id(folder: str) -> str:
    """Identifier of the weights in a Hugging Face folder, found without reading all of them; empty without any."""
    files = sorted(Path(folder).glob("*.safetensors"))
    return manifest.sampled_sha256(files) if files else ""


def texts_of(changed: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Return the changes for display: ``lr: 0.01 → 0.02``."""
    return [f"{key}: {before} → {now}" for key, (before, now) in changed.items()]


def _length_faults(plan: RunPlan, earlier: EarlierRun) -> Iterator[Fault]:
    """Yield a fault where the steps that were trained do not fit the plan: they had another size, or are too many."""
    batch, done = earlier.plan["requested"]["global_batch_size"], earlier.state.step if earlier.state else 0
    if plan.resolved.global_batch != batch:
        rule = f"was {batch} in this run, whose length and learning rate are counted in steps of that size"
        remedy = f"set {batch} again, or choose another output_model_dir"
        yield plan.requested.fault("global_batch_size", rule, remedy)
    elif done > (steps := plan.schedule.num_steps):
        rule = f"is at step {done:,} already, and this plan ends at step {steps:,}: its learning rate would never fall"
        yield Fault(str(plan.run_dir), rule, remedy="plan more epochs, train_tokens or max_steps")


def _forgotten_faults(plan: RunPlan, earlier: EarlierRun, resume_command: str) -> Iterator[Fault]:
    """Yield a fault if length, learning rate or teachers would differ from the last start's, although neither this
    command line nor a change of the file asks for that.

    Its remedy is the command that goes on as before, and the one that changes the run.
    """
    config, origin = plan.requested, plan.requested._origin
    last, was = earlier.plan["origin"], earlier.plan["requested"]
    # A change in the same file is intended. A difference between two files is not: --config may have been forgotten.
    values, tried = last.get("values", origin.values), {*last["overridden"]}
    in_file = {key for key in LENGTH_AND_RATE if key in was and values.get(key) != origin.values.get(key)}
    forgotten = tried - in_file if last["path"] == origin.path else tried | in_file
    now = config.model_dump(mode="json")
    lost = [key for key in was if key in forgotten and not config.typed(key) and was[key] != now.get(key)]
    deciding = [key for key in lost if key in LENGTH_AND_RATE]
    if not deciding:
        return
    now |= dict.fromkeys(plan.reasons, "auto")
    was_typed, new = (
        " ".join(f"--set {shlex.quote(each)}" for each in overrides(settings))
        for settings in ({key: was[key] for key in lost}, {key: now[key] for key in deciding})
    )
    rule = f"would train differently: the last start had {was_typed}, this one does not"
    remedy = f"to continue as before:\n  {resume_command} {was_typed}\nto change the run:\n  {resume_command} {new}"
    yield Fault(str(plan.run_dir), rule, remedy=remedy)


def redo_faults(plan: RunPlan) -> Iterator[Fault]:
    """Yield a fault for each file that a new run reads from the run folder, which --redo would set aside."""
    run_dir, config = plan.run_dir, plan.requested
    rule = f"lies in the run folder {run_dir}, which --redo would set aside"
    for key in sorted({*PLACES, "init_from", "teachers"} - {"output_model_dir"}):
        value = getattr(config, key, ())
        for name in (value,) if isinstance(value, str) else value:
            path = Path(name.removeprefix("@")).expanduser().resolve()
            if name not in ("", "auto") and path.is_relative_to(run_dir.resolve()):
                yield config.fault(key, rule, "move it, or choose another output_model_dir")
                break
    if config.path.resolve().is_relative_to(run_dir.resolve()):
        yield Fault(str(config.path), rule, remedy="copy it elsewhere, and name the copy by --config")


def _difference(name: str, was: Any, now: Any) -> str:
    """Return a difference of two identities as text, with the keys of `config.yaml`."""
    if name == "curriculum":
        return f"{_KEY_NAMES[name]}: another order of reading"
    # A SHA-256 is told by its beginning.
    texts = [text[:12] + "…" if len(text) == 64 else text for text in (str(was), str(now))]
    return f"{_KEY_NAMES.get(name, name)} was {texts[0]}, is now {texts[1]}"


def _only_longer(was: dict[str, Any] | None, now: dict[str, Any] | None) -> bool:
    """Tell whether a curriculum only has further stages after its last one, which was finite: its past is the same."""
    if not was or not now or "stages" not in {*was} & {*now} or was["source_tokens"] != now["source_tokens"]:
        return False
    before, after = was["stages"], now["stages"]
    return before[-1]["samples"] is not None and after[: len(before)] == before
