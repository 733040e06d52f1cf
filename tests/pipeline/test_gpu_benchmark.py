"""`benchmarks/gpu.sh` and tests/gpu, tried on a CPU with tiny models: nothing is found out there, and no line fails."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from configs import config_of
from torch.autograd import DeviceType
from torch.autograd.profiler_util import Interval

from benchmarks.gpu import first, jobs, measure, needs, predictions, profile, table, watch
from benchmarks.gpu.simulation.chip import Chip
from zerokara.model.shapes import ModelShape
from zerokara.training.planning.memory import MemoryForecast


@pytest.mark.slow
def test_first_tells_each_fact_in_a_line(root: Path, tmp_path: Path) -> None:
    """On a CPU; of tests/gpu some of each file that are not slow. A job that fails is a line, and the others go on."""
    command = ["bash", "benchmarks/gpu.sh", "--tiny", "first", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    *facts, comparison, last = map(json.loads, done.stdout.splitlines())
    rows = comparison["table"][2:]
    assert {row.split(" | ")[0] for row in rows} == {"| 1.3b-documents", "| 125m-vocabulary-128k"}, "the simulated ones"
    assert (tmp_path / "comparison.md").read_text(encoding="utf-8").splitlines()[2:] == rows
    assert facts[0]["name"] == "machine" and facts[0]["torch"] == torch.__version__
    assert list(dict.fromkeys(fact["name"] for fact in facts)) == [*jobs.FACTS, *jobs.TINY_FIRST]
    assert last["failed"] == last["left_out"] == [] and last["planned"] < jobs.FIRST_SECONDS == 540
    told: dict[str, Any] = {}
    for fact in facts:
        told[fact["name"]] = told.get(fact["name"], {}) | fact
        told |= {fact["attention"]: fact} if "attention" in fact else {}
    assert told["machine"]["compiler"] and told["machine"]["missing"] == [] and told["machine"]["tbytes"] > 0
    assert told["Flash"]["16x64"] > 0 and "Error" in told["cuDNN"]["16x64"] and "left_out" in told["FA4"]
    right = [fact for fact in facts if "gradients" in fact]
    assert len(right) == 5 and right[3]["Flash"] == [True] * 3
    assert max(error for fact in right if fact["gradients"] != "masked" for error in fact["Flash"]) < 0.01
    assert "1 skipped" in told["tests"]["summary"] and "8 passed" in told["tests"]["summary"]
    for name in jobs.TINY_FIRST:
        assert told[name]["steps"] == 1 and told[name]["save"] is None and told[name]["tokens_per_second"] > 0, name
        parts = told[name]["profile"]["parts"]
        assert parts.keys() >= {"products", "attention", "element-wise", "loss", "update", "waiting"}, name
        assert min(parts["products"], parts["loss"], parts["update"]) > 0, name
    sizes = [told[name]["parameters"] for name in jobs.TINY_FIRST]
    assert sizes[0] == sizes[2] < sizes[1], "the large vocabulary"
    assert told["125m-zero2"]["engine"] == "DeepSpeed's ZeRO, stage 2, offload: optimizer"
    assert [json.loads(line) for line in (tmp_path / "measurements.jsonl").open(encoding="utf-8")] == facts


def test_first_goes_on_after_a_failure_and_keeps_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each job has until its planned end, so that what the one before left over is its own as well."""
    clock = [0.0]
    given = argparse.Namespace(tiny=False, minutes=5.0, results=tmp_path, only=[], set=[])
    deadlines: dict[str, float] = {}

    def do(job: str, name: str, given: Any, folder: Path, deadline: float, tell: Any) -> dict[str, Any]:
        deadlines[job] = deadline
        clock[0] += first.PLAN[job] if job != "tests" else 5
        if job == "attention":
            raise RuntimeError("no such kernel")
        return {"failed": "exit code 1: out of memory"} if job == "data" else {}

    monkeypatch.setattr(first.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(first, "do", do)
    assert first.run(given, tmp_path) == ["attention", "data"]
    assert deadlines["machine"] == 30 and deadlines["tests"] == 165 and deadlines["125m-muon"] == 220
    assert max(deadlines.values()) <= 275, "of five minutes, what the plan leaves of its nine"
    *_, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert last["left_out"] == [name for name in first.PLAN if name not in deadlines]
    assert last["left_out"] == ["1.3b-muon", "125m-vocabulary-128k", "125m-zero2", "1.3b-fp8"]


def test_parts_of_a_step_are_told_by_place_and_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU has them: kernels, and the spans in which they were launched; times in μs of two steps."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def event(name: str, begin: float, end: float, span: bool = False, device: Any = DeviceType.CUDA) -> Any:
        return SimpleNamespace(
            name=name, time_range=Interval(begin, end), device_type=device, is_user_annotation=span
        )  # fmt: skip

    events = [
        event("nvjet_hsh_256x128", 0, 2000), event("flash::flash_fwd_kernel<cutlass>", 2000, 6000),
        event("triton_poi_fused__scaled_mm_silu", 5000, 7000), event("loss", 10000, 16000, span=True),
        event("nvjet_hsh_256x128", 10000, 14000), event("update", 20000, 30000, span=True),
        event("sm90_xmma_gemm_bf16", 20000, 28000), event("aten::mm", 0, 40000, device=DeviceType.CPU),
        event("ncclDevKernel_ReduceScatter", 30000, 31000),
    ]  # fmt: skip
    report = profile.summary(events, 0.02)
    assert report["parts"] == {
        "update": 4.0, "attention": 2.0, "loss": 2.0, "products": 1.0, "element-wise": 1.0, "exchange": 0.5,
        "waiting": 10.0,
    }  # fmt: skip
    assert report["idle"] == pytest.approx(0.5) and len(report["attention"]) == 1
    assert profile.part_of("triton_tem_fused_mm_3") == "products"


@pytest.mark.slow
def test_a_step_is_simulated_without_a_gpu(root: Path) -> None:
    """Eagerly: compiled layers need triton, which takes 190 MB."""
    size = {"num_layers": 2, "hidden_size": 256, "num_attn_heads": 4, "ffn_hidden_size": 512, "seq_len": 512}
    common = {"compile": "off", "optimizer": "muon", "micro_batch_size": 4, "global_batch_size": 16}
    settings = [word for key, value in {**size, **common}.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "benchmarks.gpu.simulation", "125m", "--json", *settings]
    paths = os.pathsep.join([str(root), str(root / "original_codes")])
    done = subprocess.run(
        command, cwd=root, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    config = config_of(**{**size, **common, "precision": "bf16"})
    shape = ModelShape.from_config(config, 49_500)
    assert found["parameters"] == shape.num_parameters()
    assert found["parts"].keys() == {"products", "attention", "element-wise", "loss", "update"}
    assert found["roofline_seconds"] > 16 * 512 * shape.flops_per_token() / Chip.peak_flops, "no product was left out"
    (pool, _) = MemoryForecast(config, shape, 1, 1, {}, 10**12, Chip.memory_bytes).pools
    state = sum(size for name, size in pool.parts.items() if name not in ("CUDA context", "loss", "teachers"))
    assert state < found["peak_bytes"] < pool.needed_bytes
    assert found["host_waits"] == {}, "its loss is read once, in what stands in for it"


def test_what_differs_from_the_prediction_is_marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    predicted = {"step_seconds": 0.5, "peak_bytes": 25e9, "parts": {"products": 200.0, "loss": 100.0}}
    path = tmp_path / "predicted.json"
    path.write_text(json.dumps({"125m-muon": predicted}), encoding="utf-8")
    monkeypatch.setattr(predictions, "PATH", path)
    profile_of = {"step_seconds": 0.51, "parts": {"products": 260.0, "loss": 81.0, "waiting": 9.0}}
    measured = {"profile": profile_of, "memory_bytes": 26e9}
    rows = [*predictions.compared({"125m-muon": measured, "another": measured})][2:]
    assert [row.split(" | ")[1] for row in rows if "far" in row] == ["products, ms", "waiting, ms"]
    assert rows[0] == "| 125m-muon | step, ms | 500.0 | 510.0 | 1.02 |" and len(rows) == 5


@pytest.mark.parametrize(
    ("rows", "columns", "inner", "tflops"),
    [(8192, 8192, 8192, (750, 800)), (4096, 768, 49536, (560, 600)), (128, 128, 128, (0, 10))],
    ids=["a large one", "of whose waves the last is half empty", "a small one"],
)
def test_products_take_whole_waves_of_tiles(rows: int, columns: int, inner: int, tflops: tuple[float, float]) -> None:
    seconds = Chip.product_seconds(rows, columns, inner, 1, 1.0)
    assert tflops[0] < 2 * rows * columns * inner / seconds / 1e12 < tflops[1]


def test_a_job_ends_at_its_limit_however_much_it_prints(tmp_path: Path) -> None:
    started, alive = time.monotonic(), tmp_path / "alive"
    talks = f"while sleep 0.01; do echo still here; echo >> {alive}; done"
    watched = watch.watch(
        ["bash", "-c", f"for i in {{1..99}}; do sleep 9 & done; ({talks}) & wait -n; exit 0"],
        "talks",
        tmp_path,
        started + 1,
    )
    assert watched.code == -signal.SIGKILL and watched.lines[-1][1] == watch.KILLED and len(watched.lines) > 3
    assert time.monotonic() - started < 10
    size = alive.stat().st_size
    time.sleep(0.2)
    assert alive.stat().st_size == size > 3, "what it started has ended too"


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = needs.needed()
    assert {"hjson", "annotated-types", "pydantic-core", "httpcore2"} <= wanted.keys() and "wandb" not in wanted
    monkeypatch.setattr(needs, "installed", lambda name: None if name == "hjson" else "1")
    with pytest.raises(SystemExit, match=r"lacks: hjson==[\d.]+\. .*--wheels"):
        needs.main()
    assert needs.unlisted(["numpy", "wandb", "os"]) == ["wandb"]
    commands: list[list[str]] = []
    monkeypatch.setattr(needs.subprocess, "run", lambda command, **_: commands.append(command))
    needs.gather(tmp_path)
    fetched, built = commands
    assert f"pydantic-core=={wanted['pydantic-core']}" in fetched and "3.12" in fetched
    assert built[-1] == f"deepspeed=={wanted['deepspeed']}" and {*needs.CARRIED, "deepspeed"} <= wanted.keys()


def test_what_no_longer_fits_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = argparse.Namespace(tiny=False, minutes=1.0, results=tmp_path, only=[], set=[])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measure, "make_data", lambda *_: None)
    monkeypatch.setattr(measure, "measure", lambda name, *_: {"failed": "it was begun"})
    assert measure.run_part("dense", given, tmp_path) == []  # 45 s, and the shortest is thought to take 50
    found = measure.read_lines(tmp_path)
    assert [one["name"] for one in found] == list(measure.PARTS["dense"]) and all("left_out" in one for one in found)


def test_the_table_shows_a_run_that_failed(tmp_path: Path) -> None:
    run = watch.Watched(12, [(1.0, "out of memory")], 10**9)
    facts = {"device": "cpu", "versions": {"torch": "2"}, "settings": [], **measure.facts_of(run, tmp_path)}
    plan = {
        "engine": "ours",
        "batch": "1 × 1 × 8",
        "precision": "bf16",
        "least_bytes": 10**9,
        "ample_bytes": 2 * 10**9,
    }
    measure.add_line(tmp_path, {"name": "a", **facts, **plan, "failed": "exit code 12"})
    text = "\n".join(table.lines_of(measure.read_lines(tmp_path)))
    assert "| a | – | 1 × 1 × 8 bf16 | – | n/a |" in text and "- a: FAILED, exit code 12" in text
