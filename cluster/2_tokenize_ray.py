"""Step 2 in parts, as tasks of the Ray cluster that runs (ray start), and then the merge on this machine.

    .venv/bin/python cluster/2_tokenize_ray.py 20 --config big.yaml    20 parts; what follows goes to step 2

Ray starts the part of a lost machine again on another. The same command again does what is left.
"""

import os
import subprocess
import sys
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("error: zerokara needs Python 3.11 or later: start this with .venv/bin/python, which ./setup.sh makes")

try:
    import ray
except ModuleNotFoundError:
    sys.exit("error: ray is not installed: .venv/bin/pip install --require-hashes --no-deps -r requirements/ray.lock")

ROOT = Path(__file__).resolve().parents[1]


@ray.remote(max_retries=10, scheduling_strategy="SPREAD")
def part(number: int, of: int, options: list[str], folder: str) -> int:
    """Do a part in this process, so that the part ends with the process; return the exit code."""
    from zerokara.steps.tokenize import main

    os.chdir(folder)
    return main(["--part", f"{number}/{of}", *options])


def run(of: int, options: list[str]) -> int:
    """Do all parts, and merge what they have made; the exit code."""
    environment = {"PYTHONPATH": str(ROOT / "original_codes"), "PYTHONSAFEPATH": "1", "OPENBLAS_NUM_THREADS": "1"}
    ray.init(address="auto", runtime_env={"env_vars": environment})
    # A part has a worker for each core of its machine, which therefore does one part at a time.
    counts = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    cores = min(filter(None, counts), default=1)
    waiting = [part.options(num_cpus=cores).remote(number, of, options, os.getcwd()) for number in range(of)]
    while waiting:
        ended, waiting = ray.wait(waiting)
        code = ray.get(ended[0])
        if code:
            return int(code)
        print(f"{of - len(waiting)} of {of} parts done", flush=True)
    return subprocess.run(["bash", str(ROOT / "2_tokenize.sh"), "--merge", *options], check=False).returncode


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
