#!/usr/bin/env bash
# Runs all measurements and tests that need a GPU, from the repository's root:
#
#     bench/gpu.sh RESULTS MINUTES [STAGE...]
#
# Stages, most decisive first (default: all of them):
#     smoke     every op's Triton implementation on a small case; more than three failures end the call
#     products  roofs, then the goals of the matmuls and the optimizer
#     ab        open questions: launches that decide a design
#     goals     the other goals
#     host      host time of six ops
#     check     memory errors, races, hardware counters
#     search    launch configurations behind goals that were missed
#     again     the goals of cases whose launch configurations changed
#     rest      what is left of the suite, but smoke
#     tests     the tests that need a GPU
#     steps     optimizer steps end to end, and the curve of a loss (the trainer's packages are needed)
#     report    the page
#
# And two that are run if they are named:
#     parity    of `rest`: the contract, CUDA graphs and large tensors, in bfloat16
#     kernels   the kernels of the trainer's steps
#
# RESULTS is a folder such as bench/results/nvidia-h200-2026-12-01. Each stage has a share of the minutes, and what it
# does not use is the next one's. A call resumes where an earlier one stopped (see docs/gpu.md, which has the calls of a
# quarter of an hour). Tests that passed run again only if the sources change. If $OUT is set, each finished result is
# appended to $OUT/results.jsonl, and all results and our kernels of Triton's cache are packed into $OUT. UNPACK_CACHE=1
# unpacks a packed cache in RESULTS first, from an earlier call or `make gpu-cache`: what it holds runs on the GPU, so that
# it must be one's own. commit.json, which is made with it, names the commit of the sources where there is no git (or
# COMMIT does). PYTHON is the interpreter: docs/gpu.md describes how to carry the peers' wheels.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
results=${1:?the folder of results}
minutes=${2:?minutes for this call}
shift 2
all="smoke products ab goals host check search again rest tests steps report"
# Only their ratios count, in the stages that a call is asked for. The suite divides its own part by its own shares.
weight() {
    case $1 in
    smoke) echo 18 ;; products) echo 33 ;; ab) echo 13 ;; goals) echo 24 ;; host) echo 4 ;; check) echo 8 ;;
    search) echo 60 ;; again) echo 30 ;; rest) echo 80 ;; tests) echo 50 ;; steps) echo 50 ;; report) echo 5 ;;
    parity) echo 45 ;; kernels) echo 25 ;;
    *) return 1 ;;
    esac
}
of_suite() {   # the suite's stages of this one; none: not of the suite, or one that the suite is to begin afresh for
    case $1 in
    smoke | ab | goals | host) echo "$1" ;;
    products) echo roofline,products ;;
    check) echo sanitize,counters ;;
    esac
}
read -ra stages <<<"${*:-$all}"
for stage in "${stages[@]}"; do
    weight "$stage" >/dev/null || { echo "unknown stage $stage; have $all parity kernels" >&2; exit 2; }
done
export PYTHONUNBUFFERED=1 TILEWRIGHT_REQUIRE=triton PYTHONPATH=$PWD:$PWD/lab${PYTHONPATH:+:$PYTHONPATH}
# Blocks cached for bfloat16 are too small for float64 truth; expandable segments can be reused.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
began=$SECONDS
code=0
# A fresh machine reads libraries from its disk, page by page as they are first used, for minutes. WARM=1 reads PyTorch's
# in one go, and keeps the modules that Python compiles, which an image may forbid.
if [ "${WARM:-}" = 1 ]; then
    unset PYTHONDONTWRITEBYTECODE
    export PYTHONPYCACHEPREFIX=${PYTHONPYCACHEPREFIX:-$PWD/build/pycache}
    packages=$("$PYTHON" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
    timeout 60 find "$packages"/torch "$packages"/nvidia "$packages"/triton "$packages"/sympy -type f \
        \( -name '*.so*' -o -name '*.py' -o -name '*.pyc' -o -name ptxas \) -print0 2>/dev/null |
        timeout 60 xargs -0 -P 16 -n 8 cat >/dev/null
    echo "== read $(du -shcL "$packages"/torch "$packages"/nvidia "$packages"/triton 2>/dev/null | tail -1 | cut -f1): $((SECONDS - began)) s"
fi
mkdir -p "$results"
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$PWD/build/triton-cache}
mkdir -p "$TRITON_CACHE_DIR"
packed=$results/triton-cache.tar.gz
# Pieces that a larger cache left in RESULTS belong to no archive: the first one's name tells how many.
for first in "$packed" "$packed".01of[0-9][0-9]; do
    [ -f "$first" ] || continue
    if [ "${UNPACK_CACHE:-}" != 1 ]; then
        echo "$first is not unpacked: UNPACK_CACHE=1 does, and its kernels then run; take only one's own"
    elif [ "$first" = "$packed" ]; then
        tar xzf "$packed" -C "$TRITON_CACHE_DIR"
    else
        cat "$packed".[0-9][0-9]of"${first##*of}" | tar xz -C "$TRITON_CACHE_DIR"
    fi
done
# Triton lists a kernel's files by absolute paths, and compiles it again if one is missing.
find "$TRITON_CACHE_DIR" -name '__grp__*.json' -exec sed -i -E \
    -e 's#"[^"]*\.(source|ttir|ttgir|llir|ptx)": "[^"]*", ##g' \
    -e "s#\"/[^\"]*/([^/\"]+/[^/\"]+)\"#\"$TRITON_CACHE_DIR/\1\"#g" {} +
kernels() { find "$TRITON_CACHE_DIR" -name '*.cubin' | wc -l; }
before=$(kernels)

share() {   # of the remaining minutes, by the weights of these stages ($1: how many of them) and of those after them
    local count=$1 own=0 sum=0 stage
    shift
    for stage in "$@"; do
        sum=$((sum + $(weight "$stage")))
        [ "$count" -gt 0 ] && own=$sum
        count=$((count - 1))
    done
    awk "BEGIN { m = ($minutes - ($SECONDS - $began) / 60 - 0.5) * $own / $sum; print (m > 0.1 ? m : 0.1) }"
}
commit=(--commit "${COMMIT:-$results/commit.json}")
stream=(${OUT:+--stream "$OUT/results.jsonl"})

tests() {
    local now passed=$results/tests.passed
    now=$("$PYTHON" -c "from tilewright.bench import sources; print(sources.everything())")
    if [ -n "$now" ] && [ "$(cat "$passed" 2>/dev/null)" = "$now" ]; then
        echo "passed before, with these sources"
        return
    fi
    timeout "${1}m" "$PYTHON" -m pytest -q -n 6 -p no:cacheprovider --maxfail=30 tests/ops tests/nn 2>&1 |
        tee "$results/tests.txt"
    local found=$?   # with pipefail the tests' exit code, not tee's
    [ "$found" -eq 0 ] && echo "$now" >"$passed"
    [ "$found" -eq 124 ] && return 3   # time ran out
    [ "$found" -eq 4 ] && return 1   # pytest's, of a call that is wrong; here 4 is the suite's, of too many failed ops
    return "$found"
}

steps() {   # two thirds of the minutes for the steps, the rest for the curve
    local found
    "$PYTHON" -m bench end-to-end --device cuda --out "$results" "${commit[@]}" \
        --budget "$(awk "BEGIN { print 40 * $1 }")"
    found=$?
    timeout "$(awk "BEGIN { print 20 * $1 }")" "$PYTHON" -m bench end-to-end --device cuda --curve --out "$results" \
        "${commit[@]}"
    return $((found ? found : $?))
}

pack() {   # nothing else survives the loss of the machine
    [ -n "${OUT:-}" ] || return 0
    tar czf "$OUT/.results" --exclude='triton-cache.tar.gz*' "$results" tilewright/kernels/tuned docs/performance*.md \
        docs/img 2>/dev/null
    mv "$OUT/.results" "$OUT/results.tar.gz"
    "$PYTHON" bench/carry.py cache "$TRITON_CACHE_DIR" "$OUT"
}

suite() { "$PYTHON" -m bench suite --out "$results" "${commit[@]}" "${stream[@]}" "$@"; }

while [ "${#stages[@]}" -gt 0 ]; do
    # Stages of the suite that follow one another are one call of it: a process takes seconds to start.
    of='' count=0
    for stage in "${stages[@]}"; do
        more=$(of_suite "$stage")
        [ -n "$more" ] || break
        of+=${of:+,}$more
        count=$((count + 1))
    done
    [ "$count" -gt 0 ] || count=1
    name="${stages[*]:0:$count}"
    time=$(share "$count" "${stages[@]}")
    echo "== $name, $(((SECONDS - began) / 60)) min in"
    case $name in
    search) "$PYTHON" -m bench search --goals "$results" --dtype bfloat16 --minutes "$time" \
        --out "$results/tune" "${commit[@]}" ;;
    again) suite --stage roofline,products,goals --minutes "$time" ;;
    rest) suite --skip smoke --minutes "$time" ;;
    parity) suite --stage parity,graph,big --dtype bfloat16 --minutes "$time" ;;
    kernels) "$PYTHON" -m bench end-to-end --device cuda --profile --out "$results" "${commit[@]}" ;;
    tests) tests "$time" ;;
    steps) steps "$time" ;;
    report) "$PYTHON" -m bench report ;;
    *) suite --stage "$of" --minutes "$time" ;;
    esac
    found=$?
    now=$(kernels)
    echo "== $name: exit code $found; $((now - before)) kernels compiled, $before were there"
    before=$now
    pack
    # 3, time ran out, must not hide a failure.
    if [ "$found" -ne 0 ] && { [ "$code" -eq 0 ] || [ "$code" -eq 3 ]; }; then code=$found; fi
    if [ "$found" -eq 4 ]; then
        echo "too many ops failed: nothing else is run"
        break
    fi
    stages=("${stages[@]:$count}")
done
exit "$code"
