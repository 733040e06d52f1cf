"""Compiled layers and functions: the kernels that Inductor would write, from its own scheduler; none is built or run.

A layer is traced with its backward pass, as torch.compile does it; each graph goes through Inductor up to the code.
What then computes is the graph itself, on tensors without numbers, so that shapes and storages are those of a run.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._triton
from torch import Tensor
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import compile_fx, config, ir, scheduler
from torch._inductor.compile_fx import joint_graph_passes
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import fuse_attention, joint_graph, misc_patterns, pad_mm
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import BoxedBool
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import stateless
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks.gpu.simulation.chip import PRODUCTS, Kernel, attention, product
from benchmarks.gpu.simulation.recorder import Recorder

Kernels = tuple[list[Kernel], int]
"""Those of a graph, and the bytes that it holds at its fullest beyond its inputs."""


def start() -> None:
    """Leave out what would make tensors on the device: patterns that nothing here has, and folded constants."""
    fuse_attention._sfdp_init = pad_mm._pad_mm_init = misc_patterns._misc_patterns_init = lambda *_: None
    joint_graph.constant_fold_uniform_value = lambda _: None
    torch.utils._triton.triton_hash_with_backend = lambda: "NONE"


class _Done(Exception):
    """The code is written."""


def kernels_of(graph: Any, inputs: Any, is_backward: bool, recorder: Recorder, is_inference: bool = False) -> Kernels:
    """Kernels of a graph as Inductor schedules it."""
    found: list[Kernel] = []
    extra = 0

    def stop(lowered: Any) -> Any:
        nonlocal extra
        lowered.codegen()
        for node in lowered.scheduler.nodes:
            found.extend(_kernels_of_node(node, recorder.document))
        extra = _fullest(lowered)
        raise _Done

    to_module, GraphLowering.compile_to_module = GraphLowering.compile_to_module, stop
    options = {"cudagraphs": BoxedBool(False), "is_backward": is_backward, "is_inference": is_inference, "graph_id": 0}
    quiet = {"fx_graph_cache": False, "force_disable_caches": True, "compile_threads": 1}
    try:
        with config.patch(quiet), _disable_current_modes(), DebugContext():
            compile_fx._InProcessFxCompile().codegen_and_compile(graph, inputs, (), options)
    except _Done:
        pass
    finally:
        GraphLowering.compile_to_module = to_module
    gc.collect()
    return found, extra


def _fullest(lowered: Any) -> int:
    """Bytes of all buffers at the fullest point of the schedule."""
    sizes, born, dies = dict[str, int](), dict[str, int](), dict[str, int]()
    order = list(lowered.scheduler.nodes)
    for place, node in enumerate(order):
        for name in node.get_buffer_names():
            buffer = lowered.scheduler.name_to_buf[name]
            layout = None if buffer.get_mutations() or buffer.get_aliases() else buffer.node.layout
            is_new = hasattr(layout, "size") and not isinstance(layout, ir.NoneLayout)
            numbers = math.prod(map(int, buffer.node.get_size())) if is_new else 0
            sizes[name] = numbers * buffer.node.get_dtype().itemsize if is_new else 0
            born[name], dies[name] = place, place
        for read in node.read_writes.reads:
            dies[read.name] = place
    removed = {*lowered.removed_buffers, *lowered.inplaced_to_remove}
    dies |= dict.fromkeys(lowered.get_output_names(), len(order))
    alive = [name for name in sizes if name not in removed]
    return max(sum(sizes[name] for name in alive if born[name] <= at <= dies[name]) for at in range(len(order)))


def _kernels_of_node(node: Any, document: int) -> Iterator[Kernel]:
    if isinstance(node, scheduler.NopKernelSchedulerNode):
        return
    moved = node.get_read_write_buffers_sizes()
    if not isinstance(node, scheduler.ExternKernelSchedulerNode):
        origins = (each.node.get_origins() if each.node else () for each in node.get_nodes())
        names = {_operator(origin) for every in origins for origin in every}
        yield Kernel("element-wise", f"triton {' '.join(sorted(names - {''}))}", 0.0, moved)
        return
    inner = node.node
    if isinstance(inner, ir.MultiOutput):
        return
    operator = getattr(inner, "op_overload", None)
    name = operator._schema.name if hasattr(operator, "_schema") else inner.python_kernel_name or "extern"
    name = name.rpartition("::")[2].rpartition(".")[2]
    origin = inner.origin_node or next(iter(inner.get_origins()), None)
    if name in PRODUCTS:
        kind, arguments = _product_of(origin, name)
        yield Kernel("products", name, *_with_bytes(product(kind, arguments), moved))
    elif "attention" in name or "varlen" in name:
        heads = [each for each in _values(origin) if isinstance(each, Tensor) and each.dim() >= 3]
        yield Kernel("attention", name, *_with_bytes(attention(name, heads, document), moved))
    else:
        yield Kernel("element-wise", f"extern {name}", 0.0, moved)


def _with_bytes(cost: tuple[float, float], moved: int) -> tuple[float, int, int, float]:
    return cost[0], moved, 1, cost[1]


def _operator(node: Any) -> str:
    return str(node.target._schema.name.partition("::")[2]) if hasattr(node.target, "_schema") else ""


def _values(node: Any) -> list[Any]:
    return [each.meta["val"] if isinstance(each, torch.fx.Node) else each for each in node.args]


def _product_of(node: Any, name: str) -> tuple[str, list[Any]]:
    """The product behind a kernel, and its arguments: one that is fused was rewritten, and is among its inputs."""
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if _operator(one) in PRODUCTS and (one is node or _operator(one) == name):
            return _operator(one), _values(one)
        waiting += one.all_input_nodes
    raise LookupError(name)


def compiled_layer(layer: Any, known: dict[Any, Any], recorder: Recorder) -> Callable[..., Any]:
    """Stands for `compilation.CompiledLayer`; layers of a kind share their kernels, in `known`."""
    eager, kind = layer.compute, tuple(type(each) for each in layer.modules())
    names, parameters = zip(*layer.named_parameters(), strict=True)
    constants: dict[str, Any] = {}
    summing = [each for each in layer.modules() if getattr(each, "gradient_sum", None) is not None]
    own_sums = [each.gradient_sum for each in summing]

    def pure(weights: Any, hidden: Any, tensors: Any, sums: Any) -> Any:
        given = {"mask": None, "context": None, **constants, **tensors}
        for module, total in zip(summing, sums, strict=True):
            module.gradient_sum = total
        with stateless._reparametrize_module(layer, dict(zip(names, weights, strict=True))):
            out = eager(hidden, given.pop("mask"), given.pop("context"), **given)[0]
        for module, total in zip(summing, own_sums, strict=True):
            module.gradient_sum = total
        return out

    def forward(hidden: Tensor, mask: Any = None, context: Any = None, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return eager(hidden, mask, context, **named)
        given = {"mask": mask, "context": context, **named}
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        constants.clear()
        constants.update({name: value for name, value in given.items() if name not in tensors})
        if kind not in known:
            compilers = _compiler(False, recorder), _compiler(True, recorder)
            known[kind] = aot_function(pure, *compilers, _partition, decompositions=select_decomp_table())
            with recorder.unseen():  # the first call traces
                copies = [weight.detach().requires_grad_() for weight in parameters]
                detached = {name: value.detach() for name, value in tensors.items()}
                out = known[kind](copies, hidden.detach().requires_grad_(), detached, own_sums)
                torch.autograd.backward(out, torch.empty_like(out))
                del copies, detached, out
                gc.collect()
        return known[kind](list(parameters), hidden, tensors, own_sums), context

    return forward


def _partition(graph: Any, inputs: Any, **named: Any) -> Any:
    joint_graph_passes(graph)
    return min_cut_rematerialization_partition(graph, inputs, **named, compiler="inductor")


def _compiler(is_backward: bool, recorder: Recorder) -> Callable[..., Any]:
    def compile_graph(graph: Any, inputs: Any) -> Any:
        kernels, extra = kernels_of(graph, inputs, is_backward, recorder)
        made: list[Any] = []

        def run(arguments: list[Any]) -> Any:
            own = list(arguments)
            arguments.clear()  # as torch's own: what was saved is freed as it is used
            if not recorder.is_on:  # the first call
                outs = graph(*own)
                made[:] = _recipe(own, outs)
                return outs
            with recorder.compiled(kernels, extra):
                return _made(own, made)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return compile_graph


def _recipe(given: list[Any], outs: Any) -> list[Any]:
    """Of each output of a graph: an input's storage, an earlier output's, or a new one, and how it lies there."""
    places: dict[int, tuple[str, int]] = {}
    for index, each in enumerate(given):
        if isinstance(each, Tensor):
            places.setdefault(each.untyped_storage()._cdata, ("input", index))
    found: list[Any] = []
    for index, out in enumerate(outs):
        if not isinstance(out, Tensor):
            found.append(("value", out, None))
            continue
        storage = out.untyped_storage()
        how = out.shape, out.stride(), out.storage_offset(), out.dtype, out.device
        if storage._cdata in places:
            found.append((*places[storage._cdata], how))
        else:
            places[storage._cdata] = ("output", index)
            found.append(("new", storage.nbytes() // out.element_size(), how))
    return found


def _made(given: list[Any], recipe: list[Any]) -> list[Any]:
    outs: list[Any] = []
    for kind, what, how in recipe:
        if kind == "value":
            outs.append(what)
            continue
        shape, stride, offset, dtype, device = how
        base = {"input": given, "output": outs}[kind][what] if kind != "new" else None
        base = torch.empty(what, dtype=dtype, device=device) if base is None else base
        outs.append(torch.as_strided(base, shape, stride, offset))
    return outs


def compiled_function(function: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Stands for `compilation.CompiledFunction`, without gradients."""
    seen: dict[Any, Kernels] = {}

    def call(*arguments: Any) -> Any:
        key = tuple(each.shape if isinstance(each, Tensor) else each for each in arguments)
        if key not in seen:
            with recorder.unseen():
                tensors = [torch.empty_like(each) for each in arguments if isinstance(each, Tensor)]

                def of_tensors(*given: Any) -> Any:
                    left = iter(given)
                    return function(*(next(left) if isinstance(each, Tensor) else each for each in arguments))

                graph = make_fx(of_tensors, decomposition_table=select_decomp_table())(*tensors)
                seen[key] = kernels_of(graph, tensors, False, recorder, is_inference=True)
        with recorder.compiled(*seen[key]):
            return function(*arguments)

    return call
