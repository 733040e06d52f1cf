"""The copy of a checkpoint in main memory: pinned ahead of the first save, and what a refused leaves behind."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerokara.training.saving import HostCopy

GPU = torch.device("cuda", 3)


class Cuda:
    """Stands in for CUDA: registers memory, or refuses and keeps the error for the next kernel."""

    def __init__(self, refuses: bool):
        self.refuses, self.pending_error = refuses, False
        self.registered: list[tuple[int, int, int]] = []
        self.threads: dict[str, torch.device] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # CUDA's name
        """1 for a refused, as CUDA has it."""
        assert threading.current_thread().name in self.threads
        self.pending_error |= self.refuses
        self.registered += [] if self.refuses else [(address, num_bytes, flags)]
        return int(self.refuses)

    def set_device(self, device: torch.device) -> None:
        """It holds for the calling thread alone, as in CUDA."""
        self.threads[threading.current_thread().name] = device

    def launch(self, *_: Any, **__: Any) -> torch.Tensor:
        """A kernel: raises the error that is pending, and so clears it."""
        if self.pending_error:
            self.pending_error = False
            raise RuntimeError("CUDA error: invalid argument")
        return torch.ones(1)


def install_cuda(monkeypatch: pytest.MonkeyPatch, refuses: bool) -> Cuda:
    made = Cuda(refuses)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "set_device", made.set_device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch, "zeros", made.launch)
    return made


def test_memory_is_pinned_in_a_thread_before_the_first_save(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = install_cuda(monkeypatch, refuses=False)
    copy, weight, moment = HostCopy(GPU, 1006), torch.arange(6.0).view(2, 3), torch.ones(1000)
    copies = copy.fill({"weights": [("w", weight)], "optimizer": [("w.exp_avg", moment)]})
    kept, other = copies["weights"]["w"], copies["optimizer"]["w.exp_avg"]
    assert torch.equal(kept, weight) and kept.shape == weight.shape and torch.equal(other, moment)
    assert cuda.registered == [(kept.data_ptr(), 4024, 1)] and cuda.threads == {"pin": GPU}
    replaced = copy.fill({"weights": [("w", weight + 1)]})["weights"]["w"]
    assert replaced.data_ptr() == kept.data_ptr(), "the next copy replaces it"


def test_a_refusal_to_pin_leaves_no_error_for_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = install_cuda(monkeypatch, refuses=True)
    copies = HostCopy(GPU, 3).fill({"weights": [("w", torch.ones(3))]})
    assert torch.equal(copies["weights"]["w"], torch.ones(3)) and not cuda.pending_error
    cuda.launch()


def test_its_pages_are_private() -> None:
    """Of shared memory Linux makes no huge pages."""
    parts = {"weights": [("w", torch.ones(1_000_000))]}
    kept = HostCopy(torch.device("cpu"), 1_000_000).fill(parts)["weights"]["w"]
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            begin, _, end = line.split()[0].partition("-")
            if int(begin, 16) <= kept.data_ptr() < int(end, 16):
                assert line.split()[1] == "rw-p", line
                return
    pytest.fail("it is nowhere")
