"""The copy of a checkpoint in main memory."""

import pytest
import torch

from zerokara.training.saving import HostCopy


def test_the_next_copy_replaces_it() -> None:
    copy, weight, moment = HostCopy(torch.device("cpu"), 1006), torch.arange(6.0).view(2, 3), torch.ones(1000)
    copies = copy.fill({"weights": [("w", weight)], "optimizer": [("w.exp_avg", moment)]})
    kept, other = copies["weights"]["w"], copies["optimizer"]["w.exp_avg"]
    assert torch.equal(kept, weight) and kept.shape == weight.shape and torch.equal(other, moment)
    assert copy.fill({"weights": [("w", weight + 1)]})["weights"]["w"].data_ptr() == kept.data_ptr()


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
