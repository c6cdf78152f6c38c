#!/usr/bin/env bash
# What must be known of a real GPU, in under 20 minutes, from a checkout without an installed ampatch.
#
#   benchmarks/on_gpu.sh [--small] [--only NAME,NAME] [--out FOLDER] [--device DEVICE]
#
# Sections, each with a time limit of its own; one that fails is reported and stops no other:
#   machine   versions, the device, how fast half is (ampatch doctor)
#   tests     the tests marked gpu: situations, CUDA graphs, waits as CUDA sees them, optimizers, two ranks, examples
#   counts    kernels, operators, casts, waits and graph capture per step, small shapes
#   resnet, gpt, bert   time, memory, kernels, waits, graph replay: O0 to O3, autocast, torch.compile
#   users, evaluation   models of users' sizes, in training and without gradients
#   sweep     ampatch sweep of an example
#
# --small does the same in small shapes, on the CPU where there is no GPU; its limits are three times as
# long.  --only chooses sections: where a command may take ten minutes, `--only machine,tests,counts`,
# `--only resnet,gpt` and `--only bert,users,evaluation,sweep`.  Results go to FOLDER (benchmarks/results), into
# DATE-DEVICE.md; what the programs say meanwhile goes into DATE-DEVICE.log beside it.  Later runs of a
# day add to both.  PYTHON names the interpreter (python3).  Exit status: 1 if a section failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

names=(machine tests counts resnet gpt bert users evaluation sweep)
python=${PYTHON:-python3} small='' only='' out=benchmarks/results device=''

usage() {
    echo "usage: benchmarks/on_gpu.sh [--small] [--only NAMES] [--out FOLDER] [--device DEVICE]"
    echo "NAMES, with commas between: ${names[*]}"
}

refuse() {
    { echo "benchmarks/on_gpu.sh: $1"; usage; } >&2
    exit 2
}

while (($#)); do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --small) small=--small ;;
        --only | --out | --device)
            (($# > 1)) || refuse "$1: a value is missing"
            case $1 in --only) only=$2 ;; --out) out=$2 ;; --device) device=$2 ;; esac
            shift
            ;;
        *) refuse "unknown argument $1" ;;
    esac
    shift
done
IFS=, read -ra chosen <<<"${only:-$(IFS=,; echo "${names[*]}")}"
for name in "${chosen[@]}"; do
    [[ " ${names[*]} " == *" $name "* ]] || refuse "there is no section $name"
done

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
asked='
import importlib.util, platform, sys
missing = [name for name in ("torch", "wrapt") if importlib.util.find_spec(name) is None]
if missing:
    sys.exit("pip install " + " ".join(missing))
import torch
has_gpu = torch.cuda.is_available()
print("cuda" if has_gpu else "cpu")
print(torch.cuda.get_device_name() if has_gpu else "cpu " + platform.machine())'
told=$("$python" -c "$asked") ||
    refuse "$python lacks torch or wrapt. Install what is missing, or name another interpreter in PYTHON"
device=${device:-${told%%$'\n'*}} called=${told#*$'\n'}
if [[ $device == cpu && -z $small ]]; then
    refuse "torch sees no CUDA device. With --small it runs on the CPU"
fi
slug=$(tr '[:upper:] _' '[:lower:]--' <<<"$called${small:+ small}" | tr -cd 'a-z0-9-')
mkdir -p "$out" || exit 2
page="$out/$(date +%F)-$slug.md" log="$out/$(date +%F)-$slug.log"
[[ -e $page ]] || echo "# $called${small:+, small shapes}, $(date +%F)" >"$page"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failed=0 summary=()

# section NAME SECONDS FENCE COMMAND...: runs it, and adds what it prints to the page (FENCE: as it is).
section() {
    local name=$1 limit=$(($2 * (${#small} ? 3 : 1))) fence=$3 begun=$SECONDS status state
    shift 3
    [[ " ${chosen[*]} " == *" $name "* ]] || return 0
    echo "== $name (at most $limit s)"
    echo "== $name: $*" >>"$log"
    timeout -k 20 "$limit" "$@" >"$scratch/out" 2>>"$log"
    status=$?
    case $status in
        0) state=ok ;;
        124 | 137) state="cut after $limit s" ;;
        *) state="failed, exit status $status" ;;
    esac
    ((status)) && failed=1
    summary+=("$name: $state, $((SECONDS - begun)) s")
    {
        echo -e "\n## $name\n\n$(date +%H:%M), $((SECONDS - begun)) s, $state: \`$*\`\n"
        [[ -z $fence ]] || echo '```'
        cat "$scratch/out"
        [[ -z $fence ]] || echo '```'
    } >>"$page"
    cat "$scratch/out" >>"$log"
    tail -n 4 "$scratch/out"
    ((status)) && { echo "-- $state; the last lines of $log:"; tail -n 8 "$log"; }
    echo "== $name: $state, $((SECONDS - begun)) s"
}

machine() {
    command -v nvidia-smi >/dev/null && nvidia-smi
    git log -1 --format='commit %H' 2>/dev/null
    "$python" -m ampatch doctor
}

marked() {
    "$python" -c 'import pytest' 2>/dev/null || {
        echo "pytest is missing: pip install pytest"
        return 1
    }
    local files
    mapfile -t files < <(grep -rl 'mark\.gpu' tests --include='test_*.py' | sort)
    # By NVML torch counts GPUs without starting CUDA, which a process that forks others must not do.
    PYTORCH_NVML_BASED_CUDA_CHECK=1 \
        "$python" -m pytest -q -p no:cacheprovider -m gpu -rs "${files[@]}"
}

swept() {
    local options=(--rounds 2) steps=200
    [[ $small ]] && options=(--rounds 1 --levels O0,O1 --dtypes bfloat16 --no-autocast) steps=8
    "$python" -m ampatch sweep examples/char_lm.py --out "$scratch/sweep" "${options[@]}" \
        -- --steps "$steps" --epochs 1 --device "$device"
}

export -f machine marked swept
export python small device scratch

gpu=("$python" benchmarks/run.py gpu --device "$device" $small)
plain=(--systems autocast O1 O2 O3 --compile --rounds 0 --warm-up 3)
if [[ $small ]]; then
    plain+=(--dtypes bfloat16)
    timed=(--rounds 1 --steps 2 --warm-up 1 --dtypes bfloat16 --compile O1) half=bfloat16
else
    timed=(--rounds 4 --steps 8) half=float16
fi

section machine 60 fence bash -c machine
section tests 270 fence bash -c marked
section counts 90 '' "${gpu[@]}" --small "${plain[@]}"
section resnet 240 '' "${gpu[@]}" --models ResNet-50 "${timed[@]}"
section gpt 210 '' "${gpu[@]}" --models 'GPT-2 small' "${timed[@]}"
section bert 240 '' "${gpu[@]}" --models 'BERT large' "${timed[@]}"
users=(--models encoder 'encoder, frozen' LSTM EmbeddingBags U-Net)
[[ $device == cpu ]] || users+=(ViT)  # under autocast torch's fused layer refuses it there in evaluation
users+=(--systems autocast O1 O2 O3 --compile "${timed[@]:0:4}" --dtypes "$half")
section users 150 '' "${gpu[@]}" "${users[@]}"
section evaluation 100 '' "${gpu[@]}" "${users[@]}" --evaluate
section sweep 120 fence bash -c swept

printf '%s\n' '' "${summary[@]}" "$page"
printf '%s\n' '' '## Sections' '' "${summary[@]/#/- }" >>"$page"
exit "$failed"
