"""Are the packages there that steps 2 and 3 and tests/gpu import? `benchmarks/gpu.sh` asks before it takes any time.

First by name: what the steps import themselves, and all that these packages need in turn, which requirements.lock knows
(``# via``). Then in fact: the modules are imported, in a process of their own. Standard library only.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

LOCK = Path(__file__).resolve().parents[1] / "requirements.lock"
ROOTS = (
    "backports-zstd", "deepspeed", "httpx2", "huggingface-hub", "megatron-core", "numpy", "orjson", "psutil",
    "pydantic", "pytest", "ruamel-yaml", "safetensors", "sentencepiece", "tensorboard", "transformers",
)  # fmt: skip
"""What zerokara's steps 2 and 3, and the tests of tests/gpu, import; torch is in a lock file of its own."""
ON_DEMAND = {"click", "httpx", "shellingham", "typer", "tzdata"}
"""Of what these need: for uploads and command lines, which nothing here calls, and by other names in other releases."""
OPTIONAL = {"sniffio", "tabulate", "wcwidth"}
"""Imported where they are there."""
MODULES = (
    "zerokara.steps.train", "zerokara.steps.tokenize", "zerokara.training.worker",
    "zerokara.training.compute.engine", "zerokara.training.compute.zero",
    "zerokara.training.monitoring.step_metrics", "pytest",
)  # fmt: skip


def locked() -> dict[str, tuple[str, set[str]]]:
    """Version of each package of requirements.lock that this Python would get, and which packages need it."""
    found: dict[str, tuple[str, set[str]]] = {}
    name = ""
    for line in LOCK.read_text(encoding="utf-8").splitlines():
        if entry := re.match(r"([a-z0-9.-]+)==([^ ;]+)( ;.*)?", line):
            name = entry[1] if _applies(entry[3] or "") else ""
            found |= {name: (entry[2], set())} if name else {}
        elif name and (via := re.match(r" +# via (.*)", line)):
            found[name][1].update(via[1].split(", "))
    return found


def _applies(marker: str) -> bool:
    """Whether a package with this marker is wanted here; of all markers only those of old Pythons and other systems."""
    if version := re.search(r"python_full_version < '3\.(\d+)'", marker):
        return sys.version_info < (3, int(version[1])) and "linux" in (marker + "linux")
    return not re.search(r"== '(win32|darwin|pypy|emscripten)'|>= '3\.12' and sys_platform == 'emscripten'", marker)


def needed(roots: Iterable[str] = ROOTS) -> dict[str, str]:
    """Package → version: `roots` and all that they need in turn."""
    packages = locked()
    names, before = set(roots), set[str]()
    while names != before:
        before = set(names)
        names |= {name for name, (_, needed_by) in packages.items() if needed_by & before} - ON_DEMAND
    return {name: packages[name][0] for name in sorted(names) if name in packages}


def installed(name: str) -> str | None:
    """Version of an installed package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def unlisted(modules: Iterable[str]) -> list[str]:
    """Of the packages that have these modules, those that neither `ROOTS` nor torch need: the list lacks them."""
    distributions = importlib.metadata.packages_distributions()
    # A name that several packages share (google, backports) tells of none.
    found = {names[0] for module in modules if len(names := distributions.get(module, [])) == 1}
    found = {re.sub(r"[-_.]+", "-", name).lower() for name in found}
    return sorted((found & locked().keys()) - needed([*ROOTS, "torch"]).keys() - OPTIONAL)


def main() -> None:
    """Command line."""
    torch = re.findall(r"^torch==(\S+)", LOCK.with_name("requirements-torch.lock").read_text(encoding="utf-8"), re.M)[0]
    wanted = {**needed(), "torch": torch}
    versions = {name: installed(name) for name in wanted}
    missing = [f"{name}=={version}" for name, version in wanted.items() if versions[name] is None]
    if missing:
        sys.exit(f"{sys.executable} lacks: {' '.join(missing)}. Run ./setup.sh, or give --wheels (head of gpu.sh)")
    print(f"{len(wanted)} packages are there")
    others = [name for name, version in wanted.items() if (versions[name] or "").split("+")[0] != version]
    if others:
        print("not at the locked version: " + ", ".join(f"{name} {versions[name]} ({wanted[name]})" for name in others))
    imports = "\n".join(f"import {module}" for module in MODULES)
    program = f"import sys\n{imports}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"imports fail:\n{done.stderr[-3000:]}")
    if names := unlisted(done.stdout.splitlines()[-1].split()):
        print(f"imported, and not in the list of gpu_needs.py: {' '.join(names)}")


if __name__ == "__main__":
    main()
