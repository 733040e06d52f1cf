"""GPUs that are named must be there, processes must each have a GPU or a core: told before torch is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from configs import config_of

from zerokara.config.pretrain_config import PretrainConfig
from zerokara.errors import Fault, UserError
from zerokara.training.planning import cores, processors
from zerokara.training.processes import launcher

TWO = "GPU 0: NVIDIA H200 (UUID: GPU-1b2c-11)\nGPU 1: NVIDIA L4 (UUID: GPU-9f00-22)\n"
DIVIDED = "GPU 0: NVIDIA A100 (UUID: GPU-77)\n  MIG 3g.20gb     Device  0: (UUID: MIG-aa-1)\n"
NONE = "No devices were found\n"
Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    """Make this a machine whose driver lists `gpus`, with this variable, and a torch for CUDA or for the CPU alone."""
    for module in (processors, cores, launcher):
        monkeypatch.setattr(module, "available_cores", lambda: 4)
    monkeypatch.delenv(processors.SHARE_CORES_NAME, raising=False)
    monkeypatch.setattr(processors, "_DRIVER_FILES", ())

    def make(gpus: str | None = None, named: str | None = None, cuda: str | None = "13.0") -> None:
        processors.listed.cache_clear()
        monkeypatch.setattr(processors, "_torch", lambda: {"__version__": "2.13.0", "cuda": cuda, "hip": None})
        monkeypatch.setenv("PATH", str(tmp_path))
        if gpus is not None:
            program = tmp_path / "nvidia-smi"
            program.write_text(f"#!/bin/sh\ntest $1 = -L && /bin/echo -n '{gpus}'\n", encoding="utf-8")
            program.chmod(0o755)
        monkeypatch.delenv(processors.VARIABLE, raising=False)
        if named is not None:
            monkeypatch.setenv(processors.VARIABLE, named)

    yield make
    processors.listed.cache_clear()


def config(processes: int | str = "auto") -> PretrainConfig:
    return config_of(num_processes=processes, global_batch_size=64, micro_batch_size=1)


def faults(processes: int | str = "auto") -> list[Fault]:
    with pytest.raises(UserError) as caught:
        processors.check_devices(config(processes))
    return caught.value.faults


def test_the_driver_lists_gpus_and_their_instances(machine: Machine) -> None:
    machine(TWO)
    assert processors.listed() == [
        processors.Gpu("NVIDIA H200", "GPU-1b2c-11"),
        processors.Gpu("NVIDIA L4", "GPU-9f00-22"),
    ]
    machine(DIVIDED)
    assert processors.listed() == [processors.Gpu("NVIDIA A100", "GPU-77", ("MIG-aa-1",))]
    machine(NONE)
    assert processors.listed() == []


def test_without_a_driver_there_is_no_gpu_and_with_a_silent_one_nobody_knows(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine()
    assert processors.listed() == []
    processors.listed.cache_clear()
    monkeypatch.setattr(processors, "_DRIVER_FILES", (str(tmp_path),))
    assert processors.listed() is None
    machine(named="7")
    processors.check_devices(config())  # left to torch


@pytest.mark.parametrize("named", ["0", "1,0", " 0 , 1", "GPU-9f", "GPU-1b2c-11,GPU-9f00-22", "1,-1,7"])
def test_gpus_that_are_there_may_be_named(machine: Machine, named: str) -> None:
    machine(TWO, named)
    processors.check_devices(config())


def test_part_of_a_gpu_may_be_named(machine: Machine) -> None:
    machine(DIVIDED, "MIG-aa-1")
    processors.check_devices(config(1))


@pytest.mark.parametrize(
    ("named", "wrong"),
    [("2", ["2"]), ("0,7,8", ["7", "8"]), ("GPU-00", ["GPU-00"]), ("0,x", ["x"]), ("1,1", ["1"])],
)
def test_gpus_that_are_not_there_are_an_error(machine: Machine, named: str, wrong: list[str]) -> None:
    machine(TWO, named)
    found = faults()
    assert [(fault.key, fault.value) for fault in found] == [("CUDA_VISIBLE_DEVICES", named)] * len(wrong)
    for fault, name in zip(found, wrong, strict=True):
        assert name in fault.rule.split(";")[0].replace(",", "").split()
        assert "GPU 0 to 1" in fault.remedy


def test_a_gpu_where_there_is_none_is_an_error_and_so_is_a_torch_that_cannot_use_it(machine: Machine) -> None:
    for cuda in ("13.0", None):
        machine(named="0", cuda=cuda)
        (fault,) = faults()
        assert fault.key == "CUDA_VISIBLE_DEVICES" and "there is no GPU here" in fault.rule
    machine(TWO, "0", cuda=None)
    (fault,) = faults()
    assert fault.key == "CUDA_VISIBLE_DEVICES" and "2.13.0" in fault.rule and "setup.sh" in fault.remedy


@pytest.mark.parametrize("named", ["", "-1", "NoDevFiles"])
def test_the_cpu_can_be_asked_for(machine: Machine, named: str) -> None:
    machine(TWO, named)
    processors.check_devices(config(4))
    assert processors.unused(0) is None
    assert [(fault.key, fault.value) for fault in faults(8)] == [("num_processes", 8)]


@pytest.mark.parametrize(("named", "most"), [(None, 2), ("1", 1)])
def test_more_processes_than_gpus_are_an_error(machine: Machine, named: str | None, most: int) -> None:
    machine(TWO, named)
    processors.check_devices(config(most))
    (fault,) = faults(4)
    assert (
        (fault.key, fault.value) == ("num_processes", 4) and f"at most {most}, " in fault.rule and "GPUs" in fault.rule
    )


@pytest.mark.parametrize("cuda", ["13.0", None])
def test_more_processes_than_cores_are_an_error(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, cuda: str | None
) -> None:
    machine(cuda=cuda)
    processors.check_devices(config(4))
    (fault,) = faults(8)
    assert (fault.key, fault.value) == ("num_processes", 8) and "at most 4, " in fault.rule and "cores" in fault.rule
    monkeypatch.setenv(processors.SHARE_CORES_NAME, "1")
    processors.check_devices(config(8))


def test_what_torch_sees_has_the_last_word(machine: Machine) -> None:
    machine(TWO, "0,1")
    processors.check_devices_seen(config(2), 2)
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES = 0,1: names 2, of which torch sees 0"):
        processors.check_devices_seen(config(2), 0)
    machine(TWO)
    assert "NVIDIA H200, NVIDIA L4: not used" in str(processors.unused(0))
    assert processors.unused(2) is None
    machine(TWO, cuda=None)
    assert "built for the CPU alone" in str(processors.unused(0))


def test_the_plan_names_the_device(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    machine(NONE)
    assert launcher.device_rows(2) == [("device", "CPU, 4 cores, 2 threads a process")]
    machine(TWO)
    assert [name for name, _ in launcher.device_rows(2)] == ["device", "note"]
    names = ["NVIDIA H200", "NVIDIA H200", "NVIDIA L4"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(names))
    monkeypatch.setattr("torch.cuda.get_device_name", names.__getitem__)
    assert launcher.device_rows(2) == [("device", "GPU, 2 × NVIDIA H200 (1 more not used)")]
    assert launcher.device_rows(3) == [("device", "GPU, 2 × NVIDIA H200, 1 × NVIDIA L4")]


def test_a_torch_for_the_cpu_alone_is_not_imported_to_be_asked(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take the launching process a second."""
    asked: list[str] = []
    monkeypatch.setattr(launcher, "_cuda", lambda: asked.append("asked") or pytest.importorskip("torch").cuda)
    for cuda, is_asked in ((None, False), ("13.0", True)):
        machine(cuda=cuda, named="")
        assert launcher.num_processes(config()) == 1 and launcher.gpu_bytes() is None
        assert launcher.precision(config()) in ("bf16", "fp32")
        assert launcher.device_rows(1)[0][1].startswith("CPU") and bool(asked) == is_asked


def test_the_step_says_so_before_torch_is_loaded(root: Path) -> None:
    code = (
        "import sys; from zerokara.steps import train; code = train.main(['--config', '/dev/null']); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "99", "PYTHONPATH": str(root / "original_codes")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "CUDA_VISIBLE_DEVICES = 99: " in done.stderr, done.stderr
