"""On a GPU: FlashAttention runs, compiled layers and loss compute the same, and a run goes on after a stop."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drawn_models import build
from gpu_device import DEVICE, DTYPE, REHEARSED
from shapes import shape_of
from torch.nn.attention import SDPBackend, sdpa_kernel

from zerokara.model import compilation
from zerokara.model.attention_check import check_attention
from zerokara.model.builder import Decoder
from zerokara.training.logbook import peak_flops

pytestmark = pytest.mark.gpu

BATCH, VOCAB = 4, 1000


def a_model(dtype: torch.dtype) -> Decoder:
    shape = shape_of(VOCAB, hidden_size=256, num_kv_heads=2, seq_len=256, init_std=0.1)
    return build(shape, seed=1).to(DEVICE, dtype)


def a_batch() -> list[torch.Tensor]:
    ids = torch.randint(4, VOCAB, (BATCH, 257), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    return [ids[:, :-1], ids[:, 1:], torch.ones(BATCH, 256, device=DEVICE)]


def nats_and_gradients(model: Decoder) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    nats = model(*a_batch())
    nats.backward()
    return nats.item(), {name: weight.grad.float() for name, weight in model.named_parameters()}


def test_attention_is_flash_attention_with_grouped_keys() -> None:
    """Allowed nothing but the flash kernel, torch raises an error where it cannot run."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        nats, _ = nats_and_gradients(a_model(DTYPE))
    assert nats / (BATCH * 256) < 12


@pytest.mark.parametrize("name", ["flash", *([] if REHEARSED else ["efficient"])])
def test_gradients_of_each_kernel_of_attention_are_right(name: str) -> None:
    """Documents have a kernel of their own in bf16. cuDNN is taken only where `cudnn_attention` asks for it."""
    kernel = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}[name]
    # The efficient kernel does not serve groups (torch 2.13).
    heads = {"hidden_size": 256, "num_attn_heads": 4, "num_kv_heads": 2 if name == "flash" else 4}
    with sdpa_kernel(kernel):
        check_attention(shape_of(VOCAB, seq_len=704, **heads), torch.empty((), dtype=DTYPE, device=DEVICE), True)


@pytest.mark.slow
def test_compiled_equals_written() -> None:
    model = a_model(torch.float32)
    written, gradients = nats_and_gradients(model)
    assert compilation.start(model, a_batch(), log=print)
    assert model.kernels.softmax is not None
    compiled, compiled_gradients = nats_and_gradients(model)
    assert compiled == pytest.approx(written, rel=1e-5)
    for name, gradient in gradients.items():
        error = (compiled_gradients[name] - gradient).norm() / gradient.norm()
        assert error < 1e-3, name  # TF32 is off; sums in another order


@pytest.mark.skipif(REHEARSED, reason="the peak of a CPU is not in the table")
def test_this_device_is_known() -> None:
    """Else MFU is n/a: add the device to `logbook.PEAK_BF16_FLOPS`, with its source."""
    assert peak_flops(name := torch.cuda.get_device_name(0)), name


@pytest.mark.slow
@pytest.mark.parametrize("compile_layers", ["off", "on"])
def test_resume_goes_on_as_if_unbroken(train_runs: Callable, tmp_path: Path, compile_layers: str) -> None:
    """The backward pass of FlashAttention adds up in no fixed order: not bit for bit, as it is on a CPU."""
    common = {"precision": "bf16", "compile": compile_layers, "train_tokens": 40 * 8 * 32}
    unbroken = train_runs({"unbroken": common, "broken": {**common, "stop_at": 15}}, folder=tmp_path)["unbroken"]
    resumed = train_runs({"broken": common}, folder=tmp_path)["broken"]
    assert len(resumed.losses) == 40
    assert resumed.losses == pytest.approx(unbroken.losses, abs=0.02)
    assert resumed.losses[-1] < resumed.losses[0] - 0.3
