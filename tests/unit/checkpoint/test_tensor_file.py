"""The safetensors format, one tensor at a time: written as the library reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from zerokara.checkpoint.tensor_file import TensorWriter, header

TENSORS = {"b": torch.randn(3, 5), "a": torch.randn(7), "empty": torch.zeros(0, 2), "last": torch.randn(2, 2, 2)}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


def test_the_layout_of_a_small_file_byte_by_byte() -> None:
    text = b'{"__metadata__":{"format":"pt"},"w":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}}'
    assert header({"w": (2, 3)}, torch.bfloat16) == (96).to_bytes(8, "little") + text.ljust(96)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_library_reads_what_is_written(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "model.safetensors"
    with TensorWriter(path, SHAPES, dtype) as writer:
        for name, tensor in TENSORS.items():
            writer.write(name, tensor.transpose(0, -1).contiguous().transpose(0, -1))
    loaded = load_file(path)
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], tensor.to(dtype)) for name, tensor in TENSORS.items())


def test_tensors_come_as_announced(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="a came, b is next"),
        TensorWriter(tmp_path / "x", SHAPES, torch.float32) as writer,
    ):
        writer.write("a", TENSORS["a"])
    with (
        pytest.raises(AssertionError, match="no tensor came for"),
        TensorWriter(tmp_path / "x", SHAPES, torch.float32) as writer,
    ):
        writer.write("b", TENSORS["b"])


def test_a_full_disk_is_told_with_the_file() -> None:
    """Every write to this device says that the disk is full."""
    with (
        pytest.raises(OSError, match="No space left") as caught,
        TensorWriter(Path("/dev/full"), SHAPES, torch.float32),
    ):
        pass
    assert caught.value.filename == "/dev/full"
