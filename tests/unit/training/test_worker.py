"""A training process: how it leaves, and the attention kernels that its trial names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen
from torch.nn.functional import scaled_dot_product_attention

from zerokara.model import compilation, cpu_attention
from zerokara.training import worker
from zerokara.training.planning.run_plan import RunPlan
from zerokara.training.processes import supervision
from zerokara.training.worker import attention_kernels, profile_first_forward


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (None, 0, ""),
        (MemoryError(), supervision.OUT_OF_MEMORY, "out of memory in process 0 of 1, at micro_batch_size"),
        (RuntimeError(f"[enforce] {compilation._NO_MEMORY[0]}"), supervision.OUT_OF_MEMORY, "out of memory"),
        (RuntimeError("[gloo/transport/tcp/pair.cc] closed by peer"), supervision.LOST_CONNECTION, "lost the others"),
    ],
)
def test_it_says_why_it_leaves_and_destroys_the_process_groups_at_the_end_alone(
    plan_of: Callable[..., RunPlan],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException | None,
    code: int,
    message: str,
) -> None:
    destroyed: list[bool] = []

    def work(*_: Any) -> None:
        assert not destroyed
        if error:
            raise error

    plan_of().with_settings(precision="fp32").write(tmp_path / "plan.json")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: destroyed.append(True))
    assert worker.main([str(tmp_path / "plan.json"), "work"], work={"work": work}) == code
    assert message in capsys.readouterr().err and destroyed == ([] if error else [True])


class Attention(torch.nn.Module):
    """Self-attention: torch's, with a learned bias if there is one, or our own."""

    def __init__(self, has_bias: bool, is_own: bool):
        super().__init__()
        self.is_own, self.bias = is_own, torch.nn.Parameter(torch.zeros(1, 2, 8, 8)) if has_bias else None

    def forward(self, heads_BHSE: torch.Tensor) -> torch.Tensor:
        if self.is_own:
            return cpu_attention.blocked_attention(heads_BHSE, heads_BHSE, heads_BHSE, is_causal=True)
        return scaled_dot_product_attention(heads_BHSE, heads_BHSE, heads_BHSE, attn_mask=self.bias)


@pytest.mark.parametrize(
    ("has_bias", "is_own", "expected"),
    [(False, False, "flash"), (True, False, "plain operations"), (False, True, "by blocked_attention")],
)
def test_one_pass_is_profiled(has_bias: bool, is_own: bool, expected: str, capfd: pytest.CaptureFixture[str]) -> None:
    model, heads_BHSE = Attention(has_bias, is_own), torch.randn(1, 2, 8, 4, requires_grad=True)
    seen = profile_first_forward(model)
    model(heads_BHSE).sum().backward()
    num_seen = len(seen.events())
    model(heads_BHSE)
    assert expected in attention_kernels({event.name for event in seen.events()})
    assert len(seen.events()) == num_seen and not model._forward_hooks and not model._forward_pre_hooks
    assert capfd.readouterr() == ("", "")


def test_the_operators_exist() -> None:
    """Else a name would never be found."""
    assert torch.nn.attention.varlen  # registers its own
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    for kernel in ("flash_attention", "cudnn_attention", "flash_attention_for_cpu", "varlen_attn"):
        assert kernel in attention_kernels(names).split()


def test_fewer_machines_train_the_same_batch_with_another_micro_batch(
    plan_of: Callable[..., RunPlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where one of three is lost: two share twelve sequences, of which each took four."""
    plan = plan_of("global_batch_size=12", "micro_batch_size=auto", "nodes=3", "optimizer=adamw").on_processes(3, 3)
    plan.with_settings(precision="fp32", micro_batch_size=4).write(tmp_path / "plan.json")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    found = list[RunPlan]()
    assert worker.main([str(tmp_path / "plan.json"), "work"], work={"work": found.append}) == 0
    (plan,) = found
    assert (plan.nodes, plan.data_parallel_size, plan.resolved.micro_batch) == (2, 2, 2)
