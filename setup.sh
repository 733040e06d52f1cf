#!/usr/bin/env bash
# Creates .venv and installs exactly the files of requirements/zerokara.lock and requirements/torch.lock into it: pip refuses any
# file with another hash, wherever it comes from. Safe to run again at any time: it takes an instant if nothing has
# changed, and resumes an interrupted installation.
#
#   ./setup.sh [arguments for pip]
#   PYTHON=/path/to/python3.12 ./setup.sh          uses that Python
#   ./setup.sh --extra-index-url https://download.pytorch.org/whl/cpu
#                                                  on a machine without a GPU: torch without CUDA (GBs less)
#   TORCH_BUILD=cu126 ./setup.sh                   torch for this CUDA (cu126, cu129, cu130). setup.sh says which one fits
#                                                  the driver and the cards that nvidia-smi shows. Only cu130 and the
#                                                  build without CUDA are locked here: any other is
#                                                  installed NOT VERIFIED, and only if you ask for it,
#                                                  in this way or by --extra-index-url
#   ./setup.sh --lock cu126                        locks what that build consists of, with uv (a package of PyPI)
#   ./setup.sh --help                              prints this
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")"
export PYTHONSAFEPATH=1 # a file of this folder is never taken for a Python package
started=$SECONDS
stamp=.venv/zerokara_setup.stamp

torch=$(grep -oE '^torch==[0-9.]+' requirements/torch.lock)
built='deepspeed|megatron-core' cuda='nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+|triton'
pytorch=https://download.pytorch.org/whl

fingerprint() { # of all that .venv is made from
    "$1" -c 'import sys; print(sys.version)'
    cat requirements/zerokara.lock requirements/torch*.lock setup.sh | sha256sum
}

except() { # except NAMES: of requirements/zerokara.lock all entries but those whose names are these (a regular expression)
    awk -v names="^($1)==" '/^[a-z0-9]/ { on = $0 !~ names } on && !/^ *#/' requirements/zerokara.lock
}

if [[ ${1:-} == --lock ]]; then # all that torch needs, at the versions of requirements/zerokara.lock but for CUDA's
    echo "$torch+${2:?which build, like cu126}" | uv pip compile - --universal --python-version 3.11 --generate-hashes \
        --no-annotate --quiet --constraints <(except "$cuda" | grep '^[a-z0-9]' | tr -d '\\') \
        --index-strategy unsafe-best-match --extra-index-url "$pytorch/$2" --output-file "requirements/torch-$2.lock"
    exit
fi

if [[ $(uname -s) == Darwin ]]; then
    echo "setup: macOS and Apple's GPUs are not supported: zerokara trains on Linux, on NVIDIA's GPUs or a CPU" >&2
    exit 2
fi

# A second one waits for the first, where the disk can lock: both install into .venv.
{ command exec 9>>setup.sh && flock 9; } 2> /dev/null || true

# Already done: the stamp is written last, so it exists only in a complete .venv.
if [[ -f $stamp && -z ${TORCH_BUILD:-} ]] && now=$(fingerprint .venv/bin/python 2>/dev/null) &&
    [[ $now == "$(<"$stamp")" ]]; then
    exit 0
fi

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        new_enough "$PYTHON" && echo "$PYTHON" && return
        echo "setup: PYTHON=$PYTHON is not Python 3.11 or later" >&2
        return 2
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python3.14; do
        command -v "$candidate" >/dev/null && new_enough "$candidate" && echo "$candidate" && return
    done
    echo "setup: zerokara needs Python 3.11 or later; found: $(python3 --version 2>/dev/null || echo none)." >&2
    echo "       Install one (on Ubuntu: sudo apt install python3.12 python3.12-venv), or name one: PYTHON=/path/to/python3 ./setup.sh" >&2
    return 2
}

log() { printf 'setup %s\n' "$*"; }

pip_install() { # on a terminal pip shows its downloads; in a log file it is quiet
    local quiet=--quiet
    [[ -t 1 ]] && quiet=
    # pip would compile the Python files one by one, which is half of the whole time: see below.
    # The lock files name every package, so no dependency is added; --require-hashes would refuse it anyway.
    # Where pip is configured with folders that do not exist, it would say so for each package: a hundred lines.
    .venv/bin/python -P -m pip install --disable-pip-version-check --no-compile --require-hashes --no-deps $quiet "$@" \
        2> >(grep --line-buffered -v 'is ignored: it is neither a file nor a directory' >&2)
}

entries() { # entries NAMES: of requirements/zerokara.lock, with their hashes, those whose names are these (a regular expression)
    awk -v names="^($1)==" '/^[a-z0-9]/ { on = $0 ~ names } on && !/^ *#/' requirements/zerokara.lock
}

fitting_build() { # for the driver and all cards: cu126, cu129, or nothing for PyPI's, which is cu130
    local cards driver least most
    cards=$(nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader 2>/dev/null | tr -d ' ' |
        grep -E '^[0-9.]+,[0-9]+\.[0-9]$') || { ! command -v rocm-smi >/dev/null || echo rocm; return 0; }
    driver=${cards%%.*} least=$(cut -d, -f2 <<<"$cards" | tr -d . | sort -n | head -n 1)
    most=$(cut -d, -f2 <<<"$cards" | tr -d . | sort -n | tail -n 1)
    # NVIDIA: CUDA 13 needs driver 580, each CUDA 12 525, Blackwell 570. Cards of a build: torch/cuda/__init__.py of 2.13,
    # PYTORCH_RELEASES_CODE_CC: 5.0 to 9.0 for 12.6, from 7.5 on for 12.9 and 13.0; there is no 12.8.
    if ((driver < 525 || most >= 100 && driver < 570)); then
        echo "setup: NVIDIA's driver ${cards%%,*} is too old for torch or for these cards: install 580 or later" >&2
        return 2
    fi
    if ((least < 75 || driver < 580 && most < 100)); then echo cu126; elif ((driver < 580)); then echo cu129; fi
}

is_for_cuda() { # whether the torch that is installed asks for the CUDA packages
    .venv/bin/python -c 'import sys; from importlib.metadata import requires
sys.exit(not any(name.startswith("nvidia-") for name in requires("torch")))'
}

rm -f "$stamp"
if new_enough .venv/bin/python && .venv/bin/python -m pip --version >/dev/null 2>&1; then
    log "1/4: .venv exists ($(.venv/bin/python --version)); updating it"
else
    python=$(find_python)
    log "1/4: creating .venv with $("$python" --version)"
    "$python" -m venv --clear .venv || {
        echo "setup: '$python -m venv' failed; on Debian and Ubuntu install its package: sudo apt install python3-venv" >&2
        exit 1
    }
fi

# If an index or a folder given to pip offers the build without CUDA, that one is meant; pip itself would take the other
# one if the offer had no hash. The newest builds come first in the list.
offered=$(.venv/bin/python -m pip index versions torch "$@" 2>/dev/null | grep -oE "(^| )${torch#*==}\+[a-z0-9.]+" || true)
build=$(head -n 1 <<<"${offered#*+}")
build=${TORCH_BUILD:-${build:-$(fitting_build)}}
build=${build#cu130} # PyPI's
if [[ -n $build && ! $build =~ ^(cpu|cu1[0-9]+)$ ]]; then
    echo "setup: torch for $build is not supported: zerokara trains on NVIDIA's GPUs or a CPU. For this CPU:" >&2
    echo "       TORCH_BUILD=cpu ./setup.sh" >&2
    exit 2
fi
if [[ $build == cu* && ! -f requirements/torch-$build.lock && -z ${TORCH_BUILD:-} && $offered != *"+$build"* ]]; then
    echo "setup: this driver, or a card, needs torch for $build, of which no hash is known here. To install it as" >&2
    echo "       $pytorch has it, NOT VERIFIED:  TORCH_BUILD=$build ./setup.sh" >&2
    echo "       To have it verified, record its hashes first:  ./setup.sh --lock $build" >&2
    exit 2
fi
torch+=${build:++$build}
[[ -z $build || $offered == *"+$build"* ]] || set -- "$@" --extra-index-url "$pytorch/$build"
lock=requirements/torch-$build.lock
log "2/4: $torch (the largest download$([[ $torch == *+cpu ]] || echo ", with CUDA's packages some GB"))"
# Packages without a wheel, for any Python or for the newest, and packages that only torch for CUDA needs.
left_out=$built
if [[ $build == cu* ]]; then
    left_out+="|$cuda"
    [[ ! -f $lock ]] || pip_install "$@" --only-binary :all: --requirement "$lock"
else
    pip_install "$@" --only-binary :all: --requirement <(sed "s/^torch==[^ ]*/$torch/" requirements/torch.lock)
    is_for_cuda || left_out+="|$cuda"
fi
log "3/4: $(except "$left_out" | grep -c ==) packages of requirements/zerokara.lock"
pip_install "$@" --only-binary :all: --requirement <(except "$left_out")
if [[ $build == cu* && ! -f $lock ]]; then # after what is locked, which pip then does not take from elsewhere
    log "NOT VERIFIED: no hash of $torch and of its CUDA packages is known here; they come as $pytorch has them"
    log "To have them verified: ./setup.sh --lock $build, delete .venv, and run ./setup.sh again"
    .venv/bin/python -P -m pip install --disable-pip-version-check --no-compile --only-binary :all: "$torch" "$@"
fi

# DeepSpeed's source package imports torch while it is built, so it is built without isolation: pip would fill an isolated
# environment with packages that are in no lock file. None of its compiled ops are built, since nothing may be compiled
# while a run waits; it would look for CUDA's compiler all the same, and fail without. Its setup.py imports from its own
# folder.
log "4/4: $(entries "$built" | grep -oE '^[a-z-]+==[0-9.]+' | paste -sd ' ')"
(
    unset PYTHONSAFEPATH
    export PATH="$PWD/.venv/bin:$PATH" DS_BUILD_OPS=0 DS_IGNORE_CUDA_DETECTION=1
    pip_install "$@" --no-build-isolation --requirement <(entries "$built")
)
.venv/bin/python -m pip check --disable-pip-version-check --quiet || log "the packages named above conflict"

# Makes `import zerokara` work in .venv, and the command; the path is relative to the folder that holds the file.
site_packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "../../../../original_codes" > "$site_packages/zerokara.pth"
cat >.venv/bin/zerokara <<'END'
#!/usr/bin/env bash
exec "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/python" -P -m zerokara.steps "$@"
END
chmod +x .venv/bin/zerokara
.venv/bin/zerokara --version >/dev/null

# On all cores. Some packages contain files for other Python versions, or templates, which do not compile: ignore them.
.venv/bin/python -m compileall -qq -j 0 "$site_packages" original_codes || true

fingerprint .venv/bin/python > "$stamp.partial"
mv "$stamp.partial" "$stamp"
log "done in $((SECONDS - started)) s"
