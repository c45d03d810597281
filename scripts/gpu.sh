#!/usr/bin/env bash
# Everything that this repository wants to know of a GPU, in one command, from its root:
#
#     scripts/gpu.sh RESULTS MINUTES [STAGE...]       stages: tests tune suite report (default: all)
#
# RESULTS is a folder such as bench_results/nvidia-h200-2026-12-01. Every stage ends within its share of the minutes
# and goes on where an earlier call stopped, so calls may be as short as the machine's lease; tests that have passed
# are not run again before the sources change. Where $OUT is set, what was found is packed into it as well. COMMIT names
# the sources where there is no git. Where wheels were brought (see prepare_wheels.py), run `. TARGET/env.sh` first.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
results=${1:?the folder of results}
minutes=${2:?minutes for this call}
shift 2
stages=${*:-tests tune suite report}   # times depend on tuned constants: the search comes first
export PYTHONUNBUFFERED=1 TILEWRIGHT_REQUIRE=triton PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
# Truth in float64 fills the memory that bfloat16 has cut into its own sizes.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
began=$SECONDS
code=0
mkdir -p "$results"

left() {   # minutes of what is left, as a share in percent
    "$PYTHON" -c "print(max(0.1, ($minutes - ($SECONDS - $began) / 60 - 0.5) * $1 / 100))"
}
commit=${COMMIT:+--commit $COMMIT}

tests() {   # parity over the whole registry first: nothing is timed that may be wrong
    local now passed=$results/tests.passed
    now=$("$PYTHON" -c "from tilewright.bench import run; print(run.source_digest())")
    if [ "$(cat "$passed" 2>/dev/null)" = "$now" ]; then
        echo "passed before, with these sources"
        return
    fi
    # All but those of what runs on a CPU alone; tests of an op that is added are taken in.
    local ignored=()
    for name in bench compile_gate config cute data model packaging peers performance readme registry style suite \
        trainer trainer_cp triton_ptx wheels; do
        ignored+=("--ignore=tests/test_$name.py")
    done
    timeout "$(left 40)m" "$PYTHON" -m pytest -q -p no:cacheprovider --maxfail=30 "${ignored[@]}" tests 2>&1 |
        tee "$results/tests.txt"
    local found=$?   # pipefail: of the tests, not of tee
    [ "$found" -eq 0 ] && echo "$now" >"$passed"
    [ "$found" -eq 124 ] && return 3   # time ran out
    return "$found"
}

pack() {   # a machine that is taken away keeps nothing else
    [ -n "${OUT:-}" ] || return 0
    tar czf "$OUT/.results" "$results" tilewright/kernels/tuned docs/performance.md docs/img 2>/dev/null
    mv "$OUT/.results" "$OUT/results.tar.gz"
}

for stage in $stages; do
    case $stage in
    tests | tune | suite | report) ;;
    *) echo "unknown stage $stage; have tests tune suite report" >&2; exit 2 ;;
    esac
done
for stage in $stages; do
    echo "== $stage, $(((SECONDS - began) / 60)) min in"
    case $stage in
    tests) tests ;;
    suite) "$PYTHON" -m tilewright.bench suite --minutes "$(left 90)" --out "$results" $commit ;;
    tune) "$PYTHON" -m tilewright.bench tune --minutes "$(left 40)" --work "$results/tune" $commit ;;
    report) "$PYTHON" -m tilewright.bench report ;;
    esac
    found=$?
    echo "== $stage: exit code $found"
    pack
    # 3, time ran out, must not hide a failure.
    if [ "$found" -ne 0 ] && { [ "$code" -eq 0 ] || [ "$code" -eq 3 ]; }; then code=$found; fi
done
exit "$code"
