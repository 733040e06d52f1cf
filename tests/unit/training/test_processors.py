"""GPUs that are named must be there, processes must each have a GPU or a core, and how they share the cores."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from configs import config_of, fault_of

from zerokara.base import resources
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.training.planning import processors
from zerokara.training.planning.processors import Devices

TWO = "GPU 0: NVIDIA H200 (UUID: GPU-1b2c-11)\nGPU 1: NVIDIA L4 (UUID: GPU-9f00-22)\n"
DIVIDED = "GPU 0: NVIDIA A100 (UUID: GPU-77)\n  MIG 3g.20gb     Device  0: (UUID: MIG-aa-1)\n"
NONE = "No devices were found\n"
SHARED = ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    """Make this a machine whose driver lists `gpus`, with this variable, and a torch for CUDA or for the CPU alone."""
    monkeypatch.setattr(processors, "available_cores", lambda: 4)
    monkeypatch.delenv(processors.SHARE_CORES_NAME, raising=False)

    def make(gpus: str | None = None, named: str | None = None, cuda: bool = True) -> None:
        processors._listed_gpus.cache_clear()
        monkeypatch.setattr(processors, "version", lambda _: "2.13.0" if cuda else "2.13.0+cpu")
        monkeypatch.setenv("PATH", str(tmp_path))
        if gpus is not None:
            program = tmp_path / "nvidia-smi"
            program.write_text(f"#!/bin/sh\ntest $1 = -L && /bin/echo -n '{gpus}'\n", encoding="utf-8")
            program.chmod(0o755)
        monkeypatch.delenv(processors.VARIABLE, raising=False)
        if named is not None:
            monkeypatch.setenv(processors.VARIABLE, named)

    yield make
    processors._listed_gpus.cache_clear()


def config(processes: int | str = "auto") -> PretrainConfig:
    return config_of(num_processes=processes, global_batch_size=64, micro_batch_size=1)


def check_processes(config: PretrainConfig, seen: int) -> None:
    """Check the number of processes where torch sees so many GPUs."""
    Devices(("NVIDIA H200",) * seen).process_counts(config, 0)


@pytest.mark.parametrize(("named", "seen"), [("2", 0), ("0,7,8", 1), ("GPU-00", 0), ("1,1", 0)])
def test_a_gpu_that_is_not_there_is_an_error(machine: Machine, named: str, seen: int) -> None:
    machine(TWO, named)
    fault = fault_of(check_processes, config(), seen)
    assert (fault.key, fault.value) == ("CUDA_VISIBLE_DEVICES", named)
    assert fault.rule == f"names {named.count(',') + 1}, of which torch sees {seen}"
    assert "nvidia-smi -L" in fault.remedy and "leave it empty to train on the CPU" in fault.remedy


@pytest.mark.parametrize("named", ["", "-1", "NoDevFiles"])
def test_the_cpu_can_be_asked_for(machine: Machine, named: str) -> None:
    machine(TWO, named)
    check_processes(config(4), 0)


def test_more_processes_than_gpus_or_cores_are_an_error(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(TWO)
    check_processes(config(2), 2)
    fault = fault_of(check_processes, config(4), 2)
    assert (fault.key, fault.value) == ("num_processes", 4)
    assert "at most 2, " in fault.rule and "GPUs" in fault.rule and "2" in fault.remedy
    machine(NONE)
    check_processes(config(4), 0)
    fault = fault_of(check_processes, config(8), 0)
    assert (fault.key, fault.value) == ("num_processes", 8) and "at most 4, " in fault.rule and "cores" in fault.rule
    monkeypatch.setenv(processors.SHARE_CORES_NAME, "1")
    check_processes(config(8), 0)


def test_gpus_that_torch_cannot_use_are_an_error(machine: Machine) -> None:
    """A week on the CPU is not what anyone meant."""
    machine(TWO)
    fault = fault_of(check_processes, config(), 0)
    assert "NVIDIA H200, NVIDIA L4" in fault.rule and "driver" in fault.remedy and "leave it empty" in fault.remedy
    check_processes(config(), 2)
    for named, words in ((None, "NVIDIA A100"), ("0", "2.13.0")):
        machine(DIVIDED, named, cuda=False)
        fault = fault_of(check_processes, config(), 0)
        assert words in fault.rule and "built for the CPU alone" in fault.rule and "setup.sh" in fault.remedy
    machine(NONE)
    check_processes(config(), 0)


def test_a_torch_for_the_cpu_alone_is_not_imported_to_be_asked(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take the launching process a second."""
    machine(cuda=False)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "torch", None)  # importing it fails from now on
        assert processors.devices() == Devices(computes_bf16=processors.devices().computes_bf16)
        machine()
        with pytest.raises(ImportError):
            processors.devices()


def test_a_gpu_that_torch_sees_and_cannot_use_is_an_error(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 and an L4, as a torch for CUDA 13.0 shows them, and one whose driver is too old for it."""
    cards = [
        SimpleNamespace(name="NVIDIA H200", total_memory=141, major=9, minor=0),
        SimpleNamespace(name="NVIDIA L4", total_memory=24, major=8, minor=9),
    ]
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(cards))
    monkeypatch.setattr("torch.cuda.get_device_properties", cards.__getitem__)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: not including_emulation)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    machine(TWO)
    assert processors.devices() == Devices(("NVIDIA H200", "NVIDIA L4"), 24, computes_bf16=True, computes_fp8=True)

    def initialize(index: int) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040). Please update it")

    monkeypatch.setattr("torch.cuda.get_device_properties", initialize)
    found = processors.devices()
    fault = fault_of(found.process_counts, config(), 0)
    assert (fault.key, fault.value) == ("CUDA_VISIBLE_DEVICES", None)
    assert "torch 2.13.0 for CUDA 13.0 cannot use it (The NVIDIA driver on your system is too old" in fault.rule
    machine(TWO, "")
    assert found.gpu_names == () and found.process_counts(config(4), 0) == [4], "the CPU may still be meant"


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Eight cores, nothing set by the user, and a control group without limits."""
    for name in (*SHARED, "OMP_WAIT_POLICY", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(resources, "control_groups", lambda: iter([tmp_path]))
    return tmp_path


@pytest.mark.parametrize(("given", "expected"), [("16", 16), ("5,2", 5), ("many", 4), ("", 4)])
def test_cores_are_shared_out_unless_the_user_says_how(
    eight_cores: Path, monkeypatch: pytest.MonkeyPatch, given: str, expected: int
) -> None:
    assert [processors.threads(processes) for processes in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert processors.threads(2) == expected
    assert Devices().process_environment(2)["OMP_NUM_THREADS"] == (given or "4")


def test_processes_on_gpus_share_the_cores_and_their_memory_has_no_holes(
    eight_cores: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator, older = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    monkeypatch.delenv(processors.VARIABLE, raising=False)
    given = Devices(("NVIDIA H200",) * 3).process_environment(3)
    assert [given[name] for name in SHARED] == ["2", "2"] and given["OMP_WAIT_POLICY"] == "PASSIVE"
    assert given[allocator] == "expandable_segments:True" and given[processors.VARIABLE] == "0,1,2"
    assert allocator not in Devices().process_environment(3)
    monkeypatch.setattr(processors, "available_cores", lambda: 128)
    assert [Devices(("L4",)).process_environment(1)[name] for name in SHARED] == ["128", "32"]
    for name in (allocator, older):
        with monkeypatch.context() as users:
            users.setenv(name, "backend:native")
            assert allocator not in Devices(("L4",)).process_environment(1)


def test_what_triton_misses_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu, compiler = Devices(("NVIDIA H200",)), tmp_path / "clang"
    monkeypatch.setattr("sysconfig.get_path", lambda *_: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    auto, on, off = (config_of(compile=mode) for mode in ("auto", "on", "off"))
    (note,) = gpu.notes(auto)
    assert "(gcc or clang)" in note and f"{tmp_path}/Python.h" in note
    assert not list(gpu.notes(off)) and not list(Devices().notes(on))
    compiler.touch(mode=0o755)
    assert list(gpu.notes(on))
    (tmp_path / "Python.h").touch()
    assert not list(gpu.notes(on))


def test_fp8_is_refused_where_it_cannot_be_computed() -> None:
    ada, older = Devices(("NVIDIA L4",), computes_fp8=True), Devices(("NVIDIA A100",))
    plan = config_of(precision="fp8")
    assert ada.precision(plan) == Devices().precision(plan) == "fp8"
    fault = fault_of(older.precision, plan)
    assert fault.key == "precision" and "8.9" in fault.rule and "NVIDIA A100" in fault.rule
    fault = fault_of(config_of, precision="fp8", tensor_parallel_size=2)
    assert fault.key == "precision" and "tensor_parallel_size 1" in fault.rule


@pytest.mark.parametrize(
    ("batch_tokens", "threads", "expected"),
    [(16 * 1024, "", [8, 4, 2, 1]), (5 * 1024, "", [4, 2, 1]), (2047, "", [1]), (16 * 1024, "4", [2, 1])],
)
def test_processes_share_the_cores_of_a_step_that_is_large_enough(
    eight_cores: Path, monkeypatch: pytest.MonkeyPatch, batch_tokens: int, threads: str, expected: list[int]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert Devices().process_counts(config(), batch_tokens) == expected
