#!/usr/bin/env bash
# Sets up, then runs the whole pipeline: raw text → tokenizer → tokens → training → a verified Hugging Face model.
#
#   ./run_all.sh                the three YAML files of this folder: as shipped, a small model on an embedded English
#                               corpus (documentation that is already on this machine), on a CPU, in minutes
#   ./run_all.sh model_configs/ja_llama
#                               a set: model_configs/ja_llama_sentence_piece_config.yaml, …_config.yaml and
#                               …_convert_config.yaml
#   ./run_all.sh FOLDER         the three YAML files of another folder
#   ./run_all.sh --redo ...     does every step again: earlier outputs are replaced, an earlier run is set aside
#   ./run_all.sh --redo=4 ...   the same from step 4 on (1 to 4)
#   ./run_all.sh --dry-run ...  checks the three files: that each step reads what the one before it writes, and that
#                               the outputs can be written
#   ./run_all.sh --help         prints this
#
# A step that is already done is skipped. A step that fails ends the pipeline with its exit code: 1 failed while running,
# 2 the configuration or the input is wrong.
set -euo pipefail
script="$(readlink -f "${BASH_SOURCE[0]}")"
root="${script%/*}"
cd "$root"

ready_sets() { # the ready sets, one a line, as they are named on the command line
    printf '%s\n' model_configs/*_convert_config.yaml | sed 's/_convert_config.yaml$//;s/^/  /'
}

redo_from=5 at=0 dry_run= prefix= others=()
for argument in "$@"; do
    case $argument in
        --redo) redo_from=1 ;;
        --redo=[1-4]) redo_from=${argument#--redo=} ;;
        --dry-run) dry_run=yes ;;
        -h | --help) sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p}' "$script"; exit 0 ;;
        -*) echo "run_all: there is no option $argument; see ./run_all.sh --help" >&2 && exit 2 ;;
        *) [[ $prefix ]] && echo "run_all: $argument is a second set of configuration files; give one" >&2 && exit 2
            others+=("$argument") && [[ -d $argument ]] && prefix=${argument%/}/ || prefix=${argument%_}_ ;;
    esac
done
tokenizer_config=${prefix}sentence_piece_config.yaml config=${prefix}config.yaml convert_config=${prefix}convert_config.yaml
missing=()
for file in "$tokenizer_config" "$config" "$convert_config"; do
    [[ -f $file ]] || missing+=("$file")
done
if ((${#missing[@]})); then
    printf 'run_all: %s: there is no such configuration file\n' "${missing[@]}" >&2
    printf 'All three are needed. These sets are ready to use:\n%s\n' "$(ready_sets)" >&2
    exit 2
fi

python=$root/.venv/bin/python
export PYTHONPATH="$root/original_codes${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONSAFEPATH=1 # a file of the current folder is never taken for a package
names=() seconds=()

has_begun() { # whether step 3 has already set an earlier run aside and started its own, whose run.json is then new
    local run
    run=$("$python" -c 'import sys
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
print(load(PretrainConfig, sys.argv[1]).output_model_dir)' "$config") || return 1
    (($(stat -c %Y "$run/run.json" 2> /dev/null || echo 0) >= began))
}

again() { # the command that resumes the pipeline; no finished step is repeated
    local from=$((redo_from > at ? redo_from : at))
    ((from == 3)) && has_begun && from=4 # a run that step 3 has started is resumed
    ((redo_from < 5 && from < 5)) && others=("--redo=$from" "${others[@]}")
    printf '%q ' "$0" "${others[@]}" | sed 's/ $//'
}

redo() { # the option of the current step
    ((at < redo_from)) || echo --redo
}

step() { # step NAME COMMAND...: runs one step and records its time; a failing step ends the pipeline
    local name=$1 started=$SECONDS code=0
    shift
    printf '\n━━━ %s\n' "$name"
    "$@" || code=$?
    if ((code)); then
        printf '\nrun_all: stopped at “%s” with exit code %d; %s: %s\n' "$name" "$code" \
            "$( ((code == 130)) && echo "to resume" || echo "fix the problem named above, then run")" \
            "$(again)" >&2
        exit "$code"
    fi
    names+=("$name") seconds+=($((SECONDS - started)))
}

step "setup" ./setup.sh
step "settings" "$python" -m zerokara.steps preflight "$tokenizer_config" "$config" "$convert_config"
if [[ $dry_run ]]; then
    printf '\ndry run: nothing was written\n'
    exit 0
fi
if grep -qs "data/embedded/corpus.jsonl" "$tokenizer_config" "$config"; then
    step "embedded corpus" "$python" -m zerokara.corpus.embedded data/embedded/corpus.jsonl
fi
at=1
step "1 train the tokenizer" "$python" 1_train_sentencepiece_tokenizer.py --config "$tokenizer_config" $(redo)
at=2
step "2 tokenize" bash 2_tokenize.sh --config "$config" $(redo)
at=3 began=$EPOCHSECONDS
step "count tokens" "$python" count_tokens.py --config "$config"
step "3 train the model" bash 3_train_node1.sh --config "$config" $(redo)
no_class=$("$python" -c 'if True:
    import sys
    from zerokara.config.loading import load
    from zerokara.config.pretrain_config import PretrainConfig
    print(load(PretrainConfig, sys.argv[1]).traits.no_class)' "$config")
if [[ $no_class ]]; then
    printf '\n━━━ 4 convert, 6 upload: skipped, since no Hugging Face class can hold this model: %s\n' "$no_class"
else
    at=4
    step "4 convert to Hugging Face" bash 4_convert_to_HF.sh --config "$convert_config" $(redo)
    at=5
    step "6 upload (dry run)" "$python" 6_upload.py --dry-run --config "$convert_config"
fi

"$python" - "$tokenizer_config" "$config" "$convert_config" <<'PYTHON'
import sys
from pathlib import Path

from zerokara.config.convert_config import ConvertConfig
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.publishing import exported_folder

tokenizer = load(TokenizerConfig, Path(sys.argv[1]))
pretrain = load(PretrainConfig, Path(sys.argv[2]))
convert = load(ConvertConfig, Path(sys.argv[3]))
model = Path(convert.output_tokenizer_and_model_dir)
if not pretrain.traits.no_class:
    print("\n━━━ samples of the model")
    for sample in exported_folder.proved(model).facts["samples"]:
        print(f"\n  {sample['prompt']}⟪{sample['sampled']}⟫")
run = Path(pretrain.output_model_dir)
print(
    f"""
━━━ where everything is
  tokenizer           {tokenizer.output_dir}
  tokens              {pretrain.output_prefix}_text_document.bin and .idx
  run                 {run}  (metrics.jsonl, config_resolved.yaml, checkpoints)
  training curve      {run / 'plots' / 'loss.png'}"""
)
if not pretrain.traits.no_class:
    spans, text = "5_fill_masked_spans_with_model.ipynb", "5_play_with_model.ipynb"
    notebook = spans if pretrain.traits.is_encoder_decoder else text
    print(f"  Hugging Face model  {model}\n  to play with it     python 5_generate.py --config {sys.argv[3]}, or {notebook}")
PYTHON

printf '\n━━━ time\n'
total=0
for i in "${!names[@]}"; do
    printf '  %-28s %5d s\n' "${names[i]}" "${seconds[i]}"
    total=$((total + seconds[i]))
done
printf '  %-28s %5d s\n' "all" "$total"
