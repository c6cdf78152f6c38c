#!/usr/bin/env bash
# What must be known of a real GPU, in at most ten minutes, from a checkout without an installed ampatch.
#
#   benchmarks/on_gpu.sh [--small] [--only NAME,NAME] [--out FOLDER] [--device DEVICE]
#
# Sections in the order in which they run, each with a time limit of its own; one that fails is reported and
# stops no other:
#   machine     versions, the device, how fast half is (ampatch doctor), and the native part is built
#   tests       the tests marked gpu: situations, CUDA graphs, waits as CUDA sees them, optimizers, two ranks
#   counts      kernels, operators, casts, waits and graph capture per step, small shapes
#   resnet, gpt, bert   time, memory, kernels, waits and graph replay of autocast, O1 and O2, with the native
#               part too: in training, then without gradients
#   compile     GPT-2 under torch.compile: autocast, O1, O2
#   detection   two of torchvision's detectors, in training and without gradients
#
# --small does the same in small shapes, on the CPU where there is no GPU; its limits are three times as
# long.  --only chooses sections.  Results go to FOLDER (benchmarks/results), into DATE-DEVICE.md; what the
# programs say meanwhile goes into DATE-DEVICE.log beside it.  Later runs of a day add to both.  PYTHON names
# the interpreter (python3).  Exit status: 1 if a section failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

names=(machine tests counts resnet gpt bert compile detection)
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
    "$python" -m ampatch build || echo "The native part could not be built: its rows are missing."
    "$python" -m ampatch doctor
}

marked() {
    "$python" -c 'import pytest' 2>/dev/null || {
        echo "pytest is missing: pip install pytest"
        return 1
    }
    local files workers=()
    "$python" -c 'import xdist' 2>/dev/null && workers=(-n 4)
    mapfile -t files < <(grep -rl 'mark\.gpu' tests --include='test_*.py' | sort)
    # By NVML torch counts GPUs without starting CUDA, which a process that forks others must not do.
    PYTORCH_NVML_BASED_CUDA_CHECK=1 \
        "$python" -m pytest -q -p no:cacheprovider -m gpu -rs "${workers[@]}" "${files[@]}"
}

# timed OPTIONS...: a table in training, and one without gradients.  At the end of its time it waits for the
# table of what was measured until then.
timed() {
    local failed=0 cut=0
    trap 'cut=1' TERM
    "$python" benchmarks/run.py gpu --device "$device" $small --compile "$@" || failed=1
    ((cut)) || "$python" benchmarks/run.py gpu --device "$device" $small --compile "$@" --evaluate || failed=1
    return $failed
}

export -f machine marked timed
export python small device

gpu=("$python" benchmarks/run.py gpu --device "$device" $small)
counted=(--systems autocast O1 O2 O3 --compile --rounds 0 --warm-up 3)
if [[ $small ]]; then
    counted+=(--dtypes bfloat16)
    short=(--rounds 1 --steps 2 --warm-up 1 --dtypes bfloat16)
else
    short=(--rounds 3 --steps 6 --warm-up 3 --dtypes float16)
fi
systems=(--systems autocast O1 O2 'O1 native' 'O2 native')

section machine 45 fence bash -c machine
section tests 120 fence bash -c marked
section counts 35 '' "${gpu[@]}" --small "${counted[@]}"
section resnet 80 '' bash -c 'timed "$@"' timed --models ResNet-50 "${short[@]}" "${systems[@]}"
section gpt 80 '' bash -c 'timed "$@"' timed --models 'GPT-2 small' "${short[@]}" "${systems[@]}"
section bert 90 '' bash -c 'timed "$@"' timed --models 'BERT large' "${short[@]}" "${systems[@]}"
section compile 90 '' "${gpu[@]}" --models 'GPT-2 small' "${short[@]}" --systems autocast --compile autocast O1 O2
section detection 60 '' bash -c 'timed "$@"' timed --models 'Faster R-CNN' RetinaNet "${short[@]}" --systems autocast O1 O2

printf '%s\n' '' "${summary[@]}" "$page"
printf '%s\n' '' '## Sections' '' "${summary[@]/#/- }" >>"$page"
exit "$failed"
