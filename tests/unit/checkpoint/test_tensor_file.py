"""The safetensors format, one tensor at a time: written as the library reads it, and read as it writes."""

import errno
import hashlib
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from zerokara.base.durable import write_file
from zerokara.checkpoint import tensor_file
from zerokara.checkpoint.state import stored_tensors
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
    if dtype == torch.float32:
        assert tensor_file.write(path, TENSORS) == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(("name", "message"), [("a", "a came, b is next"), ("b", "no tensor came for")])
def test_tensors_come_as_announced(tmp_path: Path, name: str, message: str) -> None:
    writer = TensorWriter(tmp_path / "x", SHAPES, torch.float32)
    with pytest.raises(AssertionError, match=message), writer:
        writer.write(name, TENSORS[name])


def test_a_full_disk_is_told_with_the_file() -> None:
    """Every write to this device says that the disk is full."""
    writer = TensorWriter(Path("/dev/full"), SHAPES, torch.float32)
    with pytest.raises(OSError, match="No space left") as caught, writer:
        pass
    assert caught.value.filename == "/dev/full"


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    large = torch.arange(40_000.0).view(200, 200)  # over several pages, and not from the beginning of one
    all_of_them = {**TENSORS, "large": large}
    save_file(all_of_them, path, metadata={"format": "pt"})
    tensors = stored_tensors([path])
    assert tensors.keys() == all_of_them.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in all_of_them.items())
    tensors["large"][0, 0] = 7.0
    assert tensors["large"][0, 0] == 0.0, "a change must not reach the file"


def test_a_tensor_leaves_memory_with_its_last_user(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"w": torch.ones(100, 100)}, path)

    def mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text(encoding="utf-8")

    tensors = stored_tensors([path])
    assert not mapped()
    part = tensors["w"][5:]
    assert mapped() and float(part.sum()) == 9500
    del part
    assert not mapped()


def test_a_disk_without_permissions_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount of Windows, of CIFS and the like refuses every chmod."""

    def refused(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "fchmod", refused)
    with TensorWriter(tmp_path / "t", {"a": (2,)}, torch.float32) as writer:
        writer.write("a", torch.ones(2))
    for text in ("one", "another"):
        write_file(tmp_path / "text", text)
    assert (tmp_path / "text").read_text(encoding="utf-8") == "another"
    assert torch.equal(load_file(tmp_path / "t")["a"], torch.ones(2))
