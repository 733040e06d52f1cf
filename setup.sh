#!/usr/bin/env bash
# Makes .venv and installs into it the exact versions of requirements.lock. Safe to run again at any time: it takes an
# instant when nothing changed, and goes on where an interrupted run stopped.
#
#   ./setup.sh [arguments for pip]
#   PYTHON=/path/to/python3.12 ./setup.sh          uses that Python
#   ./setup.sh --extra-index-url https://download.pytorch.org/whl/cpu
#                                                  on a machine without a GPU: torch without the CUDA packages (GBs less)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
started=$SECONDS
stamp=.venv/zerokara_setup.stamp

fingerprint() { # what .venv must have been made from
    "$1" -c 'import sys; print(sys.version)'
    cat requirements.lock pyproject.toml setup.sh | sha256sum
}

# Already done: the stamp is written last, so it stands only in a whole .venv.
if [[ -f $stamp ]] && now=$(fingerprint .venv/bin/python 2>/dev/null) && [[ $now == "$(<"$stamp")" ]]; then
    exit 0
fi

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        new_enough "$PYTHON" && echo "$PYTHON" && return
        echo "setup: PYTHON=$PYTHON is not a Python of version 3.11 or later" >&2
        return 2
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python3.14; do
        command -v "$candidate" >/dev/null && new_enough "$candidate" && echo "$candidate" && return
    done
    echo "setup: zerokara needs Python 3.11 or later; found: $(python3 --version 2>/dev/null || echo none)." >&2
    echo "       Install one (on Ubuntu: sudo apt install python3.12 python3.12-venv), or name one: PYTHON=/path/to/python3 ./setup.sh" >&2
    return 2
}

say() { printf 'setup %s\n' "$*"; }

pip_install() { # on a terminal pip shows its downloads; in a log file it is quiet
    local quiet=--quiet
    [[ -t 1 ]] && quiet=
    # pip would compile Python's files one after another, for half of the time that all this takes: see below.
    .venv/bin/python -m pip install --disable-pip-version-check --no-compile $quiet "$@"
}

pins() { grep -E "^($1)==" requirements.lock; }

rm -f "$stamp"
if new_enough .venv/bin/python && .venv/bin/python -m pip --version >/dev/null 2>&1; then
    say "1/4: .venv is there ($(.venv/bin/python --version)); completing it"
else
    python=$(find_python)
    say "1/4: making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv || {
        echo "setup: '$python -m venv' failed; on Debian and Ubuntu install its package: sudo apt install python3-venv" >&2
        exit 1
    }
fi

say "2/4: $(pins torch) (the largest download: some GB where there is a GPU)"
pip_install "$@" $(pins 'torch|setuptools|wheel')

say "3/4: everything else in requirements.lock ($(grep -cE "==" requirements.lock) packages in all)"
pip_install "$@" --requirement <(grep -vE '^deepspeed==' requirements.lock)

# DeepSpeed's source package imports torch while it is built, so it is built here and not in an isolated place; none of
# its own compiled ops are wanted, since nothing may be compiled while a run waits.
say "4/4: $(pins deepspeed), without compiled ops"
DS_BUILD_OPS=0 pip_install "$@" --no-build-isolation --no-deps $(pins deepspeed)

# Makes `import zerokara` work in .venv; the path is relative to the folder that holds the file.
site_packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "../../../../original_codes" > "$site_packages/zerokara.pth"
.venv/bin/python -c 'import zerokara'

# On all cores. Some packages carry files for other versions of Python, or templates: what does not compile is left.
.venv/bin/python -m compileall -qq -j 0 "$site_packages" original_codes || true

fingerprint .venv/bin/python > "$stamp.partial"
mv "$stamp.partial" "$stamp"
say "done in $((SECONDS - started)) s"
