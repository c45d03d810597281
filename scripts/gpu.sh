#!/usr/bin/env bash
# Runs all measurements and tests that need a GPU, from the repository's root:
#
#     scripts/gpu.sh RESULTS MINUTES [STAGE...]       stages: goals ab search again rest tests report (default: all)
#
# RESULTS is a folder such as bench_results/nvidia-h200-2026-12-01. The most decisive stages come first: the goals; the
# open questions; the search of launch configurations behind unmet goals; the goals again. Then come the rest of the
# suite, the tests and the page. Each stage ends within its share of the minutes and resumes where an earlier call
# stopped, so a call may be short and run some stages only (see docs/benchmarking.md). Tests
# that passed run again only if the sources change. If $OUT is set, each finished result is appended to
# $OUT/results.jsonl, and all results and Triton's cache are packed into $OUT. A triton-cache.tar.gz in RESULTS, from an
# earlier call or `make gpu-cache`, is unpacked first. COMMIT names the sources' commit where there is no git. PYTHON is
# the interpreter: docs/benchmarking.md describes how to get the peers' wheels without a package registry.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
results=${1:?the folder of results}
minutes=${2:?minutes for this call}
shift 2
stages=${*:-goals ab search again rest tests report}
export PYTHONUNBUFFERED=1 TILEWRIGHT_REQUIRE=triton PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
# Blocks cached for bfloat16 are too small for float64 truth; expandable segments can be reused.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
began=$SECONDS
code=0
mkdir -p "$results"
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$PWD/build/triton-cache}
mkdir -p "$TRITON_CACHE_DIR"
if [ -f "$results/triton-cache.tar.gz" ]; then
    tar xzf "$results/triton-cache.tar.gz" -C "$TRITON_CACHE_DIR"
    # Triton lists a kernel's files by absolute paths, and compiles it again if one is missing.
    find "$TRITON_CACHE_DIR" -name '__grp__*.json' -exec sed -i -E \
        -e 's#"[^"]*\.(source|ttir|ttgir|llir|ptx)": "[^"]*", ##g' \
        -e "s#\"/[^\"]*/([^/\"]+/[^/\"]+)\"#\"$TRITON_CACHE_DIR/\1\"#g" {} +
fi
kernels() { find "$TRITON_CACHE_DIR" -name '*.cubin' | wc -l; }
before=$(kernels)

left() {   # $1 percent of the remaining minutes
    awk "BEGIN { m = ($minutes - ($SECONDS - $began) / 60 - 0.5) * $1 / 100; print (m > 0.1 ? m : 0.1) }"
}
commit=${COMMIT:+--commit $COMMIT}
stream=${OUT:+--stream $OUT/results.jsonl}

tests() {
    local now passed=$results/tests.passed
    now=$("$PYTHON" -c "from tilewright.bench import sources; print(sources.everything())")
    if [ "$(cat "$passed" 2>/dev/null)" = "$now" ]; then
        echo "passed before, with these sources"
        return
    fi
    timeout "$(left 90)m" "$PYTHON" -m pytest -q -p no:cacheprovider --maxfail=30 tests/ops tests/nn 2>&1 |
        tee "$results/tests.txt"
    local found=$?   # with pipefail the tests' exit code, not tee's
    [ "$found" -eq 0 ] && echo "$now" >"$passed"
    [ "$found" -eq 124 ] && return 3   # time ran out
    return "$found"
}

pack() {   # nothing else survives the loss of the machine
    [ -n "${OUT:-}" ] || return 0
    tar czf "$OUT/.results" "$results" tilewright/kernels/tuned docs/performance*.md docs/img 2>/dev/null
    mv "$OUT/.results" "$OUT/results.tar.gz"
    # Without the text files beside machine code: a launch does not read them.
    tar czf "$OUT/.cache" --exclude='*.source' --exclude='*.tt*ir' --exclude='*.llir' --exclude='*.ptx' \
        --exclude='tmp.pid*' -C "$TRITON_CACHE_DIR" . && mv "$OUT/.cache" "$OUT/triton-cache.tar.gz"
}

suite() { "$PYTHON" -m tilewright.bench suite --out "$results" $commit $stream "$@"; }

for stage in $stages; do
    case $stage in
    goals | ab | search | again | rest | tests | report) ;;
    *) echo "unknown stage $stage; have goals ab search again rest tests report" >&2; exit 2 ;;
    esac
done
for stage in $stages; do
    echo "== $stage, $(((SECONDS - began) / 60)) min in"
    case $stage in
    goals) suite --goals --minutes "$(left 90)" ;;
    ab) suite --stage ab --minutes "$(left 80)" ;;
    search) "$PYTHON" -m tilewright.bench tune --goals "$results" --dtype bfloat16 --minutes "$(left 70)" \
        --work "$results/tune" $commit ;;
    again) suite --goals --minutes "$(left 70)" ;;   # times only cases whose launch configurations changed
    rest) suite --minutes "$(left 80)" ;;
    tests) tests ;;
    report) "$PYTHON" -m tilewright.bench report ;;
    esac
    found=$?
    now=$(kernels)
    echo "== $stage: exit code $found; $((now - before)) kernels compiled, $before were there"
    before=$now
    pack
    # 3, time ran out, must not hide a failure.
    if [ "$found" -ne 0 ] && { [ "$code" -eq 0 ] || [ "$code" -eq 3 ]; }; then code=$found; fi
done
exit "$code"
