"""A CUDA device that has shapes and storages, and no numbers: torch's CPU build is told that it has an H100.

torch asks its device for little before a FakeTensor lives on it. A library of twenty lines, built into a folder of the
user's at its first use, answers the questions of C++; what Python asks is replaced here. It holds for one process.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import subprocess
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu.simulation.chip import Chip

LIBRARY = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, FakeGuardImpl<DeviceType::CUDA>); }
namespace at {
struct NoCUDA : CUDAHooksInterface {
  NoCUDA(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void deviceSynchronize(DeviceIndex) const override {}
};
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", NoCUDA);
}
"""


class Stream:
    """The only stream, and an event of it: both are always done."""

    cuda_stream = device_index = stream_id = 0

    def __init__(self, *_: Any, **__: Any):
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def record(self, *_: Any) -> Stream:
        """Return an event."""
        return self

    def query(self) -> bool:
        """All is done."""
        return True

    record_event = record

    def wait(self, *_: Any) -> None:
        """Nothing to wait for."""

    synchronize = wait_stream = wait_event = wait


def pretend(folder: Path) -> None:
    """Let torch, which must not be imported yet, believe in an H100; its library is built in `folder`."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    torch_folder = Path(found.origin).parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    library = folder / f"no_cuda-{importlib.metadata.version('torch')}.so"
    if not library.exists():
        source, built = (folder / f"no_cuda-{os.getpid()}.{kind}" for kind in ("cpp", "so"))
        source.write_text(LIBRARY, encoding="utf-8")
        include, linked = str(torch_folder / "include"), ["-L", str(torch_folder / "lib"), "-lc10", "-ltorch_cpu"]
        flags = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", "-I", include]
        subprocess.run([*flags, str(source), "-o", str(built), *linked], check=True)
        source.unlink()
        built.rename(library)
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_folder / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # before torch looks for CUDA
    import torch

    stream = Stream()
    kind = types.SimpleNamespace(**Chip.properties)
    state = torch.zeros(16, dtype=torch.uint8)

    @contextmanager
    def a_stream(_: Any = None) -> Iterator[None]:
        yield

    class Device:
        def __init__(self, *_: Any):
            self.idx = 0

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: Any) -> None:
            pass

    answers: dict[str, Any] = {
        "is_available": True, "device_count": 1, "is_initialized": True, "current_device": 0, "set_device": None,
        "get_device_capability": (9, 0), "get_device_name": kind.name, "get_device_properties": kind,
        "synchronize": None, "is_bf16_supported": True, "current_stream": stream, "default_stream": stream,
        "init": None, "_lazy_init": None, "max_memory_reserved": 0, "max_memory_allocated": 0,
        "get_arch_list": ["sm_90"], "empty_cache": None, "_exchange_device": 0, "_maybe_exchange_device": 0,
        "manual_seed_all": None, "is_current_stream_capturing": False, "manual_seed": None, "memory_allocated": 0,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    in_c = {
        "getDevice": 0, "getDeviceCount": 1, "setDevice": None, "getCurrentRawStream": 0, "exchangeDevice": 0,
        "maybeExchangeDevice": 0, "synchronize": None, "isCurrentStreamCapturing": False, "init": None,
        "getArchFlags": "sm_90",
    }  # fmt: skip
    for name, answer in in_c.items():
        setattr(torch._C, f"_cuda_{name}", lambda *_, answer=answer: answer)
    torch.cuda.stream, torch.cuda.Stream, torch.cuda.Event = a_stream, Stream, Stream
    for place in (torch.cuda, torch.cuda.random):
        place.get_rng_state, place.set_rng_state = lambda *_, **__: state, lambda *_, **__: None
    torch.cuda.device = torch.cuda._DeviceGuard = Device
    torch.accelerator.current_stream = lambda *_: stream
    torch.accelerator.current_accelerator = lambda *_, **__: None  # so that no real tensor is made on it
    torch.version.cuda = "13.0"
