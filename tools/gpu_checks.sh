#!/usr/bin/env bash
# Runs what only a GPU can tell, several parts at once, and prints a short table; whole outputs go to DIRECTORY.
# Usage: tools/gpu_checks.sh DIRECTORY [tests] [memory] [speed]     (all three by default)
#   tests    pytest -m gpu
#   memory   compute-sanitizer over the kernels, at tiny and at published sizes
#   speed    benchmarks, when all else has ended, one to a GPU
# $PYTHON is the interpreter, by default .venv/bin/python; $LIMIT the seconds that a part may take (600).
set -u
cd "$(dirname "$0")/.."
out=${1:?name a directory for the outputs}
shift
parts=${*:-tests memory speed}
mkdir -p "$out"
python=${PYTHON:-.venv/bin/python}
limit=${LIMIT:-600}
gpus=$(nvidia-smi --list-gpus | wc -l)
[ "$gpus" -gt 0 ] || { echo "gpu_checks: nvidia-smi lists no GPU" >&2; exit 2; }
last=$((gpus - 1))
workers=$(($(nproc) / 4))  # each takes some GB of a GPU
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
began=$SECONDS

# run NAME GPUS COMMAND...: a part whose output goes to NAME.log
run() {
    local name=$1 devices=$2
    shift 2
    CUDA_VISIBLE_DEVICES=$devices timeout "$limit" "$@" >"$out/$name.log" 2>&1
    echo "$name ended with $? after $((SECONDS - began)) s"
}
mtpkit() { run "$1" "$2" "$python" -c "from mtpkit.cli.main import main; main()" bench "${@:3}"; }
tests() { run "$1" "$2" "$python" -m pytest -p no:cacheprovider -q -m gpu "${@:3}"; }
memory() {
    run "$1" "$2" compute-sanitizer --tool memcheck "$python" -m benchmarks.kernels --check-only --context-length 64 "${@:3}"
}

wanted() { [[ " $parts " == *" $1 "* ]]; }

if wanted tests; then
    tests kernels "$last" -n "$workers" tests/kernels tests/bench &
    tests engine 0 -n "$workers" --dist worksteal tests --ignore tests/kernels --ignore tests/bench \
        --ignore tests/engine/test_several_gpus.py --ignore tests/engine/test_rank_failures.py --ignore tests/training &
    # Those of two GPUs are skipped where there is one.
    tests ranks "$(seq -s , 0 "$last")" -n 4 tests/engine/test_several_gpus.py tests/engine/test_rank_failures.py \
        tests/training &
    wait
fi
if wanted memory; then
    for model in nemotron-h-tiny nemotron-3-tiny qwen3-next-tiny deepseek-v3-tiny; do
        memory "memory_$model" "$last" --model "$model" --rows 1 5 &
    done
    ((gpus > 1)) || wait
    for model in qwen3.5-slice qwen3-next-slice deepseek-v3-slice; do  # one after another: they fill a GPU
        memory "memory_$model" 0 --model "$model" --rows 1 --num-speculative-tokens 0
    done
    wait
fi
if wanted speed; then
    decode=(decode --batch-size 1 16 64 --num-speculative-tokens 0 3 --max-tokens 160 --no-trace)
    (
        mtpkit load_0 0 load --num-speculative-tokens 0
        mtpkit decode_8b 0 "${decode[@]}"
    ) &
    ((gpus > 1)) || wait
    (
        mtpkit load_3 "$last" load --num-speculative-tokens 3
        for model in qwen3-next-slice qwen3.5-slice deepseek-v3-slice; do
            mtpkit "decode_$model" "$last" "${decode[@]}" --model "$model" --repeats 2
        done
        mtpkit prefill "$last" load --workload prefill --num-speculative-tokens 0
        mtpkit train "$last" train backend=local data.sequence_length=4096 data.global_batch_size=1
    ) &
    wait
fi
echo
for log in "$out"/*.log; do
    echo "== $(basename "$log" .log), $(grep -c 'relative difference' "$log") comparisons"
    grep -E "^[0-9]+ (passed|failed)|^(FAILED|ERROR) |ERROR SUMMARY|mtpkit: error|^ +(inf|[0-9]+) .* [0-9]+%" "$log" | cut -c1-220
done
