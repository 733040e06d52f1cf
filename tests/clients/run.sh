#!/usr/bin/env bash
# Proves that other people's clients read an export as we do, and that step 2 reads from an object store. Installs what
# that takes into .clients, beside .venv and out of its way (some 0.6 GB, the first time), then runs the tests of this
# folder.
#
#   bash tests/clients/run.sh                       all clients
#   bash tests/clients/run.sh transformers4         one or several: transformers4 ctranslate2 llama_cpp trl harness
#                                                   s3 transformers_js (this one needs Node.js, and is left out without)
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$here/../.."
export PYTHONSAFEPATH=1
python=.venv/bin/python
[[ -x $python ]] || ./setup.sh

installed() { # installed FOLDER LOCK: whether FOLDER was made from this LOCK; its mark is written last
    [[ -f .clients/$1/lock.sha256 ]] && sha256sum --status --check ".clients/$1/lock.sha256"
}
mark() { sha256sum "$2" >".clients/$1/lock.sha256"; }

packages() { # packages FOLDER LOCK: exactly what the lock says, nothing that it needs (that is in requirements/zerokara.lock)
    installed "$@" && return
    rm -rf ".clients/$1"
    $python -m pip install --disable-pip-version-check --quiet --no-compile --require-hashes --no-deps \
        --target ".clients/$1" -r "$2"
    mark "$@"
}

converter() { # converter FOLDER LOCK: llama.cpp's converter, out of the source of a package that carries it
    installed "$@" && return
    rm -rf ".clients/$1" && mkdir -p ".clients/$1/source"
    $python -m pip download --disable-pip-version-check --quiet --require-hashes --no-deps --no-binary :all: \
        --dest ".clients/$1/source" -r "$2"
    tar -xzf ".clients/$1"/source/*.tar.gz -C ".clients/$1" --strip-components=3 --wildcards \
        '*/vendor/llama.cpp/convert_hf_to_gguf.py' '*/vendor/llama.cpp/conversion/*' '*/vendor/llama.cpp/gguf-py/*'
    rm -rf ".clients/$1/source"
    mark "$@"
}

javascript() { # javascript FOLDER LOCK
    installed "$@" && return
    rm -rf ".clients/$1"
    local package integrity
    read -r package integrity < <(grep -v '^#' "$2")
    npm install --silent --no-audit --no-fund --ignore-scripts --prefix ".clients/$1" "$package"
    grep -qF "\"integrity\": \"$integrity\"" ".clients/$1/node_modules/.package-lock.json" || {
        rm -rf ".clients/$1"
        echo "run.sh: $package has another hash than $2 says" >&2
        exit 1
    }
    mark "$@"
}

clients=("$@")
if ((!$#)); then
    clients=(transformers4 ctranslate2 llama_cpp trl harness s3)
    if command -v npm >/dev/null; then clients+=(transformers_js); else echo "transformers_js is left out: no npm here"; fi
fi
tests=()
for client in "${clients[@]}"; do
    tests+=("tests/clients/test_$client.py")
    [[ -f ${tests[-1]} ]] || { echo "run.sh: there is no client $client; see $0" >&2 && exit 2; }
    case $client in
        transformers4) packages transformers4 tests/clients/requirements-transformers4.lock ;;
        harness) packages harness tests/clients/requirements-harness.lock ;;
        s3) packages s3 tests/clients/requirements-s3.lock ;;
        transformers_js) javascript transformers.js tests/clients/requirements-javascript.lock ;;
        trl) packages training tests/clients/requirements-training.lock ;;&
        ctranslate2 | llama_cpp) packages inference tests/clients/requirements-inference.lock ;;&
        llama_cpp) converter llama.cpp tests/clients/requirements-sources.lock ;;&
        *) packages transformers4 tests/clients/requirements-transformers4.lock ;;
    esac
done
exec $python -m pytest "${tests[@]}"
