"""A Python that has everything imported: each program that a test starts through it is forked, which takes no time.

``server.py SOCKET`` imports what the steps import, prints ``ready``, and then serves `client`, which stands in for the
interpreter: it gets arguments, environment, working folder and the three standard streams, runs the program in a fork
that is as a new interpreter would be, and sends back the process id and, once the program has ended, its status. A
client that is gone takes its program with it. Nothing but imports happens here, so no program sees what another did.

The training processes that such a program starts in its turn are forked as well (`_ForkedProcesses`).
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

LOADED_LATE = (
    "deepspeed", "deepspeed.module_inject.auto_ep_layer", "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.stage_1_and_2", "numpy.ma", "pyarrow", "safetensors.torch",
    "sentencepiece.sentencepiece_model_pb2", "sklearn.metrics", "torch._dynamo", "torch.profiler._cupti_monitor",
    "torch.utils.tensorboard", "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe", "transformers.models.t5.modeling_t5",
    "transformers.generation.utils",
)  # fmt: skip


def main(place: str) -> None:
    _import_everything()
    os.environ.clear()
    with socket.socket(socket.AF_UNIX) as listening, selectors.DefaultSelector() as selector:
        listening.bind(place)
        listening.listen()
        selector.register(listening, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        print("ready", flush=True)
        while True:
            for key, _ in selector.select():
                if key.fileobj is listening:
                    _serve(listening.accept()[0], selector)
                elif key.fileobj is sys.stdin:
                    return
                else:
                    key.data()


def _import_everything() -> None:
    import zerokara

    for module in pkgutil.walk_packages(zerokara.__path__, "zerokara."):
        with contextlib.suppress(ImportError):
            importlib.import_module(module.name)
    for name in LOADED_LATE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import deepspeed
    import torch

    if torch.cuda.device_count():
        sys.exit("a process that has used a GPU cannot be forked")
    deepspeed.ops.__compatible_ops__.get("deepspeed_shm_comm")  # it probes for compilers
    gc.collect()
    gc.freeze()  # or the first collection of each process would copy all of this one's memory


def _serve(connection: socket.socket, selector: selectors.BaseSelector) -> None:
    """Start the program that a client asks for."""
    head, streams, _, _ = socket.recv_fds(connection, 8, 3)
    text = b""
    while len(text) < int(head, 16):
        text += connection.recv(1 << 16)
    request = json.loads(text)
    pid = os.fork()
    if not pid:
        _in_fork(streams, lambda: _run(request["arguments"]), request["environment"], request["folder"])
    for stream in streams:
        os.close(stream)
    connection.sendall(f"{pid}\n".encode())
    ended = os.pidfd_open(pid)

    def finish() -> None:
        selector.unregister(ended)
        selector.unregister(connection)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # of one that has ended the number is still taken
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(ended)
        with contextlib.suppress(OSError):
            connection.sendall(f"{status}\n".encode())
        connection.close()

    selector.register(ended, selectors.EVENT_READ, finish)
    selector.register(connection, selectors.EVENT_READ, finish)


def _in_fork(streams: Sequence[int], work: Callable[[], None], environment: dict[str, str], folder: str) -> None:
    """Be as a new interpreter in this environment and folder, do the work, and end."""
    code = 1
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        _renew()
        code = _code_of(work)
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)


def _renew() -> None:
    """Give this process what a new one would have of its own."""
    import huggingface_hub.constants
    import torch
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    importlib.reload(huggingface_hub.constants)  # it holds what the environment says
    for name, module in list(sys.modules.items()):
        if name.startswith("zerokara"):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
    random.seed()
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    sys.stdin = os.fdopen(0, closefd=False, encoding="utf-8")
    sys.stdout = os.fdopen(1, "w", closefd=False, encoding="utf-8")
    sys.stdout.reconfigure(write_through=bool(os.environ.get("PYTHONUNBUFFERED")))
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, encoding="utf-8", errors="backslashreplace")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    subprocess_handler.Popen = _ForkedProcesses  # type: ignore[attr-defined]


def _code_of(work: Callable[[], None]) -> int:
    """The exit code that an interpreter would end with; negative for a signal."""
    code = 0
    try:
        try:
            work()
        except SystemExit as leaving:
            if isinstance(leaving.code, str):
                print(leaving.code, file=sys.stderr)
            code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        except KeyboardInterrupt:
            traceback.print_exc()
            code = -signal.SIGINT
        except BaseException:
            traceback.print_exc()
            code = 1
        threading._shutdown()  # type: ignore[attr-defined]
    finally:
        atexit._run_exitfuncs()
    return code


def _run(arguments: list[str]) -> None:
    """``python ARGUMENTS``: options, then ``-m MODULE``, ``-c CODE`` or a script, and its own arguments."""
    while arguments[0] in ("-u", "-P"):
        if arguments[0] == "-u":
            sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        arguments = arguments[1:]
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    base = [path for path in sys.path if "site-packages" in path or path.startswith(sys.base_prefix)]
    sys.path[:] = [*filter(None, places), *base]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.modules.pop(arguments[1], None)  # it is run, not imported
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")


class _ForkedProcesses(subprocess.Popen[Any]):
    """The `Popen` of torch's agent, but a training process is forked from this one, which has imported everything."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *others: Any) -> None:
        environment = others[3]
        is_training = args[:3] == (sys.executable, "-u", "-m")
        if not is_training or len(os.listdir("/proc/self/task")) > 1:  # threads would be cut off in whatever they hold
            super()._execute_child(args, executable, preexec_fn, *others)  # type: ignore[misc]
            return

        def work() -> None:
            _run(list(args[1:]))

        self.pid = os.fork()
        self._child_created = True
        if not self.pid:
            # What this process wants to be done at its end is not the new one's.
            atexit._clear()
            weakref.finalize._registry.clear()  # type: ignore[attr-defined]
            os.setsid()
            _in_fork((0, 1, 2), work, environment, os.getcwd())


if __name__ == "__main__":
    main(sys.argv[1])
