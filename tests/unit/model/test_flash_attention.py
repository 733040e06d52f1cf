"""Which attention kernels a GPU uses, and that those of a package serve only where they run."""

from collections.abc import Iterator

import flash
import pytest
import torch
from torch.nn import attention as torch_attention

from zerokara.model import attention

FA3, FA4, BOTH = ["FA3"], ["FA4"], ["FA3", "FA4"]
HOPPER, BLACKWELL, AMPERE, CONSUMER = (9, 0), (10, 0), (8, 0), (12, 0)


@pytest.mark.parametrize(
    ("installed", "capability", "dtype", "head_dim", "expected"),
    [
        ([], HOPPER, torch.bfloat16, 128, None),
        (BOTH, HOPPER, torch.bfloat16, 128, "FA3"),
        (FA4, HOPPER, torch.bfloat16, 128, "FA4"),
        (BOTH, HOPPER, torch.bfloat16, 256, "FA3"),
        (FA4, HOPPER, torch.bfloat16, 256, None),
        (BOTH, BLACKWELL, torch.bfloat16, 64, "FA4"),
        (FA4, (10, 3), torch.bfloat16, 64, "FA4"),
        (FA3, BLACKWELL, torch.bfloat16, 64, None),
        (BOTH, AMPERE, torch.bfloat16, 64, None),
        (BOTH, CONSUMER, torch.bfloat16, 64, None),
        (BOTH, HOPPER, torch.float32, 64, None),
        (BOTH, HOPPER, torch.bfloat16, 20, None),
    ],
)
def test_the_choice_follows_from_what_is_there(
    installed: list[str], capability: tuple[int, int], dtype: torch.dtype, head_dim: int, expected: str | None
) -> None:
    assert attention.flash_choice(installed, capability, dtype, head_dim) == expected


class Library:
    """The handle of kernels."""

    is_removed = False

    def remove(self) -> None:
        self.is_removed = True


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """A GPU with FlashAttention 4, in torch's registry."""
    assert not attention._is_installed("not.there") and attention._is_installed("torch.nn")
    handle = Library()
    monkeypatch.setitem(torch_attention._registry._FLASH_ATTENTION_IMPLS, "FA4", lambda: handle)
    monkeypatch.setattr(attention, "_is_installed", lambda module: module == "flash_attn.cute")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: HOPPER)
    yield handle
    torch_attention._registry._FLASH_ATTENTION_ACTIVE = None
    torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_installed_serves_where_it_runs(library: Library, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    flash.install()
    run, cpu = attention._try_flash, torch.device("cpu")

    def on_a_cpu(head_dim: int, dtype: torch.dtype, _: torch.device) -> None:
        assert (head_dim, dtype) == (64, torch.bfloat16)
        assert torch_attention.current_flash_attention_impl() == "FA4" and not torch.backends.cuda.cudnn_sdp_enabled()
        run(head_dim, torch.float32, cpu)
        assert not fails, "an assertion of the kernels'"

    monkeypatch.setattr(attention, "_try_flash", on_a_cpu)
    lines: list[str] = []
    attention.start_flash(64, torch.bfloat16, cpu, lines.append)
    assert not lines and torch_attention.current_flash_attention_impl() is None, "on a CPU nothing is looked for"
    attention.start_flash(64, torch.bfloat16, torch.device("cuda"), lines.append)
    assert torch_attention.current_flash_attention_impl() == (None if fails else "FA4")
    assert torch.backends.cuda.cudnn_sdp_enabled() is library.is_removed is fails
    (line,) = lines
    assert ("AssertionError" in line) is fails and "flash_attn.cute" in line
