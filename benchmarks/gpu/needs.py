"""Are the packages there that steps 2 and 3 and tests/gpu import? `benchmarks/gpu.sh` asks before it takes any time.

With ``wheels FOLDER`` it gathers those that an image with torch lacks, for a machine without a network.

First by name: what the steps import themselves, and all that these packages need in turn, which the lock file knows
(``# via``). Then in fact: the modules are imported, in a process of their own. Standard library only.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

LOCK = Path(__file__).resolve().parents[2] / "requirements/zerokara.lock"
ROOTS = (
    "backports-zstd", "deepspeed", "httpx2", "huggingface-hub", "megatron-core", "numpy", "orjson", "psutil",
    "pydantic", "pytest", "ruamel-yaml", "safetensors", "sentencepiece", "tensorboard", "transformers",
)  # fmt: skip
"""What zerokara's steps 2 and 3, and the tests of tests/gpu, import; torch is in a lock file of its own."""
ON_DEMAND = {"click", "colorama", "httpx", "shellingham", "typer", "tzdata"}
"""Of what these need: for uploads, command lines and Windows, which nothing here calls, and by other names in other
releases."""
OPTIONAL = {"pyarrow", "sniffio", "tabulate", "wcwidth"}
"""Imported where they are there."""
CARRIED = (
    "annotated-types", "backports-zstd", "hjson", "httpcore2", "httpx2", "megatron-core", "orjson", "pydantic",
    "pydantic-core", "ruamel-yaml", "truststore", "typing-inspection",
)  # fmt: skip
"""What an image with torch, transformers, sentencepiece and pytest lacks of these, beside DeepSpeed."""
IMAGE = ("3.12", "manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
"""Its Python, and the platforms that its pip installs."""
MOST_BYTES = 64 * 2**20
MODULES = (
    "zerokara.steps.train", "zerokara.steps.tokenize", "zerokara.training.worker",
    "zerokara.training.compute.engine", "zerokara.training.compute.zero",
    "zerokara.training.monitoring.step_metrics", "pytest",
)  # fmt: skip


def locked() -> dict[str, tuple[str, set[str]]]:
    """Version of each package of requirements/zerokara.lock that this Python would get, and which packages need it."""
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


def gather(folder: Path) -> None:
    """Fetch the wheels in the locked versions; DeepSpeed's is built from its source, with none of its operators."""
    packages, (python, *platforms) = locked(), IMAGE
    pip = [sys.executable, "-m", "pip"]
    fetch = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", "--dest", str(folder)]
    fetch += [part for platform in platforms for part in ("--platform", platform)]
    names = [f"{name}=={packages[name][0]}" for name in CARRIED]
    subprocess.run([*pip, "download", "--quiet", "--no-deps", *fetch, *names], check=True)
    build = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    environment = {**os.environ, "DS_BUILD_OPS": "0"}
    subprocess.run([*build, f"deepspeed=={packages['deepspeed'][0]}"], check=True, env=environment)
    wheels = list(folder.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{len(wheels)} wheels of {size / 1e6:.1f} MB in {folder}")
    if size > MOST_BYTES:
        sys.exit(f"more than {MOST_BYTES / 1e6:.0f} MB: begin with an empty folder")


def main() -> None:
    """Command line."""
    if sys.argv[1:2] == ["wheels"]:
        gather(Path(sys.argv[2]))
        return
    torch = re.findall(r"^torch==(\S+)", LOCK.with_name("torch.lock").read_text(encoding="utf-8"), re.M)[0]
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
        print(f"imported, and not in the list of benchmarks/gpu/needs.py: {' '.join(names)}")


if __name__ == "__main__":
    main()
