"""A plan: what it refuses, its table, what it makes of the machine that it is for, and its file."""

import os
import re
import shutil
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orjson
import pytest
from configs import fault_of
from tiny import T5

from zerokara.base import resources
from zerokara.base.errors import RunError, UserError
from zerokara.base.progress import bytes_text
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.samples.packed_tokens import PackedTokens
from zerokara.tokens.indexed import IndexedTokens, TokenPaths, bin_path
from zerokara.training import auto_settings, launching
from zerokara.training.planning import plan_table, processors, recipe
from zerokara.training.planning.processors import Devices
from zerokara.training.planning.run_plan import RunPlan, make_plan, read_plan

Make = Callable[..., RunPlan]
STAGES = "stages=[{tokens: 5000, order: sequential}, {tokens: rest, order: shuffle}]"


@pytest.fixture
def make(plan_of: Make) -> Make:
    return lambda *overrides, **how: plan_of(*overrides, **how).with_settings(precision="fp32")


def test_the_vocabulary_must_be_shared_in_whole_rows(make: Make) -> None:
    heads = ("hidden_size=60", "num_attn_heads=6", "num_kv_heads=3", "ffn_hidden_size=96", "tensor_parallel_size=3")
    fault = fault_of(make, *heads, processes=3)
    assert (fault.key, fault.value) == ("tensor_parallel_size", 3) and "512" in fault.rule


def test_a_plan_reads_no_sample(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of data that take gigabytes."""
    rows = dict(plan_table.rows(make()))
    monkeypatch.setattr(PackedTokens, "many", lambda *_: 1 / 0)
    assert dict(plan_table.rows(make()))["length"] == rows["length"]


def test_a_plan_is_ten_lines_and_in_full_it_has_the_reasons(make: Make) -> None:
    plan = make("optimizer=adamw", "lr=auto", "train_tokens=20000", processes=2)
    rows, in_full = dict(plan_table.rows(plan)), list(plan_table.rows(plan, in_full=True))
    assert len(rows) <= 9, "and a title"
    assert f"learning rate {plan.resolved.lr:g} to " in rows["learning"] and "2, ZeRO" in rows["processes"]
    assert re.fullmatch(r"about [\d.]+ MB needed by 2 processes, [\d.]+ [GT]B there", rows["memory"])
    assert not any("no effect" in text for _, text in in_full), "nobody has asked for it"
    further = in_full[len(rows) :]
    assert {name for name, _ in further} == {"recipe", "engine", "memory", "data begins"}
    assert "optimizer state" in dict(further)["memory"] and "lr " in dict(further)["recipe"]


def test_documents_far_shorter_than_a_sequence_are_told_with_what_fits(make: Make) -> None:
    long = make("seq_len=4096", "global_batch_size=auto", "train_tokens=auto", "epochs=3")
    (note,) = [text for name, text in plan_table.rows(long) if name == "note"]
    fitting, most = (int(re.findall(pattern, note)[0]) for pattern in (r"seq_len: (\d+) ", r"at most (\d+);"))
    lengths = IndexedTokens(long.data.training.prefix).lengths
    assert most <= fitting < 2 * most and 0.94 < lengths[lengths <= most].sum() / lengths.sum() < 0.97
    assert "note" not in dict(plan_table.rows(make(f"seq_len={fitting}", "train_tokens=auto", "epochs=1")))
    assert long.reasons["global_batch_size"].startswith("32,768 tokens a step"), "eight sequences"


def test_a_text_that_is_read_more_often_than_the_rules_were_tried_with_is_told(make: Make) -> None:
    for epochs, is_told in ((recipe.TRIED_EPOCHS - 0.2, False), (recipe.TRIED_EPOCHS + 0.2, True)):
        rows = plan_table.rows(make("train_tokens=auto", f"epochs={epochs}"))
        told = [text for _, text in rows if "docs/recipe.md" in text]
        assert bool(told) == is_told and all(f"{epochs:.1f} times" in text for text in told)


def test_tokens_of_another_tokenizer_are_refused(make: Make, tiny_data: dict[str, str], tmp_path: Path) -> None:
    other = tmp_path / "other.model"
    # The same pieces, one more field at the end of the file: another content.
    other.write_bytes(Path(tiny_data["input_tokenizer_file"]).read_bytes() + b"\x3a\x00")
    fault = fault_of(make, f"input_tokenizer_file={other}")
    assert "sha256" in fault.rule and "--redo" in fault.remedy


@pytest.mark.parametrize("place", [3, -3])
def test_an_id_that_the_tokenizer_lacks_is_found(
    make: Make, tiny_data: dict[str, str], tmp_path: Path, place: int
) -> None:
    source = Path(tiny_data["output_prefix"])
    for path in source.parent.glob(f"{source.name}*"):
        shutil.copyfile(path, tmp_path / path.name)
    plan = make(f"output_prefix={tmp_path / source.name}")
    ids = np.memmap(bin_path(plan.data.training.prefix), np.uint16, mode="r+")
    ids[place] = 500  # the pieces are 0 to 499
    ids.flush()
    (fault,) = plan.faults()
    assert re.search(r" 500; .* 500 .*--redo", str(fault))
    assert not list(make().faults())


def test_a_family_whose_tokenizer_could_not_be_exported_is_refused_before_it_trains(make: Make) -> None:
    (fault,) = make("architecture=qwen2").faults()
    assert fault.key == "architecture" and "Qwen2Tokenizer" in fault.rule and "qwen3" in fault.remedy
    assert not list(make("architecture=qwen2").faults(existing_checkpoints=1)), "what is trained goes on"


def limit_disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 0, free))


def test_checkpoints_that_will_not_fit_are_told_in_numbers(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make("save_interval=2", "keep_last=2", "optimizer=adamw")
    limit_disk(monkeypatch, 1_000_000)
    (fault,) = plan.faults()
    each = 12 * plan.shape.num_parameters()
    # The two newest, the one that is being written, and the best.
    numbers = ("4 of", bytes_text(each), bytes_text(4 * each), "1.0 MB")
    assert fault.key == "output_model_dir" and all(number in fault.rule for number in numbers)
    limit_disk(monkeypatch, each - 1)
    assert "not even one checkpoint fits" in str(*plan.faults())


@pytest.mark.parametrize("room", [1, 3, 6])
@pytest.mark.parametrize("kept", [(), ("keep_every=2",), ("keep_best=false",)])
def test_the_save_interval_that_is_advised_fits(
    make: Make, monkeypatch: pytest.MonkeyPatch, room: int, kept: tuple[str, ...]
) -> None:
    settings = ("save_interval=2", "keep_last=4", *kept)
    plan = make(*settings)
    limit_disk(monkeypatch, room * plan.checkpoint_bytes)
    faults = list(plan.faults())
    assert bool(faults) == (plan.max_checkpoints > room)
    for fault in faults:
        advised = re.findall(r"(save_interval: \d+) fits", fault.remedy)[0].replace(": ", "=")
        assert not list(make(*settings, advised, "keep_every=0", "keep_best=false").faults())


def test_on_a_cpu_processes_share_the_cores(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def processes(*overrides: str) -> int:
        return auto_settings.on_this_machine(make(*overrides, processes=None)).num_processes

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(processors, "available_cores", lambda: 4)
    assert processes("micro_batch_size=auto") == 1  # a step has 256 tokens
    monkeypatch.setattr(processors, "MIN_PROCESS_TOKENS", 64)
    assert processes("micro_batch_size=auto") == 4
    assert processes("micro_batch_size=4") == 2  # of eight sequences
    assert processes("micro_batch_size=auto", "num_processes=1") == 1
    monkeypatch.setattr(resources, "available_memory", lambda count: 6 * 10**8)
    assert processes("micro_batch_size=auto") == 1  # each has libraries of its own


def test_every_gpu_gets_a_process_with_tensor_parallelism_too(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(processors.VARIABLE, raising=False)
    monkeypatch.setattr(processors, "devices", lambda: Devices(("NVIDIA H200",) * 4, 140 * 10**9, computes_bf16=True))
    plan = auto_settings.on_this_machine(make("tensor_parallel_size=2", "optimizer=adamw", processes=None))
    assert (plan.num_processes, plan.data_parallel_size) == (4, 2)


def test_precision_follows_the_hardware_only_when_asked(make: Make) -> None:
    for precision in ("fp32", "bf16"):
        config = make(f"precision={precision}").requested
        assert Devices(computes_bf16=precision == "fp32").precision(config) == precision
    plan = make("precision=auto")
    assert [Devices(computes_bf16=each).precision(plan.requested) for each in (True, False)] == ["bf16", "fp32"]
    assert (plan.resolved.precision, plan.requested.precision) == ("fp32", "auto")


def test_settings_that_the_architecture_does_not_read_are_noticed(make: Make) -> None:
    rows = make("num_experts=16", "noise_density=0.2").data.plan_rows
    assert ("note", "without effect with architecture llama: noise_density: 0.2, num_experts: 16") in rows
    rows = make("num_experts=4", "architecture=mixtral").data.plan_rows
    assert "without effect" not in str((rows, make().data.plan_rows))


def test_tokens_of_another_corpus_are_noticed(make: Make) -> None:
    paths = TokenPaths(make().resolved.output_prefix)
    (entry,) = [each["entry"] for each in orjson.loads(paths.manifest.read_bytes())["facts"]["sources"]]

    def notes(*overrides: str) -> str:
        return "; ".join(text for name, text in make(*overrides).data.plan_rows if "step 2" in text)

    same = f"input_jsonl=[{entry}]"
    assert notes(same) == "", "nothing has changed"
    assert f"the tokens of {entry}, with another input_jsonl;" in notes("input_jsonl=[other.jsonl]")
    assert "with another valid_fraction; if" in notes(same, "valid_fraction=0.3")
    assert "another valid_jsonl; if" in notes(same, "valid_jsonl=[held.jsonl]", "valid_fraction=0")
    made = bin_path(paths.train).stat()
    os.utime(bin_path(paths.train), ns=(made.st_atime_ns, made.st_mtime_ns + 1))
    assert f"{bin_path(paths.train)} was copied or changed since step 2 made it" in notes(same)
    os.utime(bin_path(paths.train), ns=(made.st_atime_ns, made.st_mtime_ns))


def test_token_files_say_what_a_document_begins_with(make: Make) -> None:
    """Those of an earlier version begin with nothing, whatever the tokenizer would put before a text now."""
    manifest = TokenPaths(make().resolved.output_prefix).manifest
    content = manifest.read_bytes()
    record = orjson.loads(content)
    without = {key: value for key, value in record["facts"].items() if key != "start_id"}
    try:
        for start in (5, -1):
            facts = {**without, "start_id": start} if start >= 0 else without
            manifest.write_bytes(orjson.dumps({**record, "facts": facts}))
            plan = make()
            assert plan.encoder.start_id == start
            assert ("begin without" in str(plan.data.plan_rows)) == (start == 5), "the toy tokenizer puts nothing there"
    finally:
        manifest.write_bytes(content)


def test_a_cpu_compiles_where_it_pays(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long run in bf16 beside fast matrix products."""

    def compile_of(has_amx: bool, *overrides: str) -> str:
        monkeypatch.setattr(processors, "devices", lambda: Devices(computes_bf16=True, has_amx=has_amx))
        return auto_settings.on_this_machine(make("precision=auto", *overrides)).resolved.compile

    assert compile_of(True) == "auto", "a short run"
    plan = make()
    operations = plan.shape.flops_per_token() * plan.schedule.batch_tokens * plan.schedule.num_steps
    monkeypatch.setattr(auto_settings, "LONG_RUN", operations)
    assert compile_of(True) == "on" and compile_of(False) == "auto"
    assert compile_of(True, "precision=fp32") == "auto" and compile_of(True, "compile=off") == "off"
    monkeypatch.setattr(auto_settings, "LONG_RUN", 1.01 * operations)
    assert compile_of(True) == "auto"


def test_without_init_from_nothing_is_imported_for_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zerokara.huggingface.from_hf", None)  # importing it fails from now on
    monkeypatch.delattr("zerokara.huggingface.from_hf", raising=False)
    launching.check_fits(make(), starts=True)
    with pytest.raises(ImportError):
        launching.check_fits(make("init_from=a_model"), starts=True)


def test_a_plan_for_several_machines(make: Make) -> None:
    plan = make("num_processes=2", "nodes=2", "micro_batch_size=2", processes=4, nodes=2)
    assert (plan.num_processes, plan.processes_per_node, plan.data_parallel_size) == (4, 2, 4)
    alone = plan.on_processes(2, 1)
    assert (alone.num_processes, alone.nodes, alone.data_parallel_size) == (2, 1, 2)
    assert plan.memory.pools[0].num_processes == 2, "those of one machine share its memory"
    with pytest.raises(UserError, match="global_batch_size"):
        plan.on_processes(6, 3)
    parallel = ("num_processes=1", "nodes=2", "tensor_parallel_size=2", "micro_batch_size=2", "optimizer=adamw")
    with pytest.raises(UserError, match="tensor_parallel_size = 2: must divide the 1 processes of each machine"):
        make(*parallel, processes=2, nodes=2).on_processes(2)


def test_a_hierarchy_of_the_users_own_is_checked_with_the_final_number_of_processes(make: Make, tmp_path: Path) -> None:
    """With `auto` the plan is first made for one."""
    template = tmp_path / "template.json"
    template.write_text('{"zero_optimization": {"zero_hpz_partition_size": 2}}', encoding="utf-8")
    settings = ("zero_stage=3", "optimizer=adamw", "global_batch_size=12", "micro_batch_size=1")
    plan = make(*settings, f"deepspeed_template={template}")
    assert plan.on_processes(4).template["zero_optimization"]["zero_hpz_partition_size"] == 2
    with pytest.raises(UserError, match=r"template.json: its zero_hpz_partition_size, 2, must divide the 3 processes"):
        plan.on_processes(3)


def test_its_file_gives_the_training_processes_the_same_plan(make: Make, tmp_path: Path) -> None:
    settings = ("lr=auto", "optimizer=auto", "sample_prompts=[ab, c]", "max_hours=1.5", STAGES)
    plan = make(*settings, processes=2).with_settings(micro_batch_size=1)
    plan.write(path := tmp_path / "plan.json")
    read = read_plan(path)
    assert (read.resolved, read.requested, read.reasons) == (plan.resolved, plan.requested, plan.reasons)
    assert plan.reasons and read.resolved.where("seq_len") == plan.resolved.where("seq_len")
    assert (read.shape, read.schedule, read.consumption) == (plan.shape, plan.schedule, plan.consumption)
    assert (read.num_processes, read.nodes, read.template) == (plan.num_processes, plan.nodes, plan.template)
    assert read.data.training.identity() == plan.data.training.identity()
    read.write(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
    for replaced in ("data_sha256", "tokenizer_sha256", "code_sha256"):
        (tmp_path / "again.json").write_bytes(orjson.dumps({**orjson.loads(path.read_bytes()), replaced: "0" * 64}))
        with pytest.raises(RunError, match="replaced"):
            read_plan(tmp_path / "again.json")


def test_prompts_of_auto_are_beginnings_of_held_out_documents(make: Make, tmp_path: Path) -> None:
    settings = ("sample_prompts=auto", "model_size=1M", "num_layers=2", "hidden_size=48", "num_attn_heads=4")
    plan = make(*settings)
    prompts, tokens = plan.requested.sample_prompts, IndexedTokens(plan.data.valid_prefix)
    held_out = [plan.encoder.decode(tokens[number].tolist()) for number in range(len(tokens))]
    assert len(prompts) == 3 and all(any(text.startswith(prompt) for text in held_out) for prompt in prompts)
    assert make(*settings).requested.sample_prompts == prompts
    plan.write(tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").resolved.sample_prompts == prompts
    assert plan.reasons.keys() >= {"sample_prompts", "model_size"}  # numbers stand beside it


def test_a_t5_gets_a_masked_span_in_each_prompt(span_data: dict[str, str]) -> None:
    settings = [f"{key}={value}" for key, value in {**T5, "sample_prompts": "auto"}.items()]
    prompts = make_plan(load(PretrainConfig, span_data["config"], settings)).resolved.sample_prompts
    assert len(prompts) == 3 and all(prompt.count(" <extra_id_0> ") == 1 for prompt in prompts)
