#!/usr/bin/env bash
# `make gpu`: tests and benchmarks on a machine with a GPU, python3 (3.12), torch 2.11, triton 3.6
# and no network. Runs the kernel tests natively, the engine's parity tests on the GPU, then the
# benchmarks, which write benchmarks/results/<gpu>/kernels.json. Without a GPU the kernel tests run in
# Triton's interpreter, and the benchmarks run with tiny sizes on the CPU and write nothing.
#
#   hack/gpu.sh [PYTHON]
#   PARTS="tests engine bench"   parts to run, in this order; also: tune (launch configurations)
#   TUNE_MINUTES=6               time limit of tune
#   BENCH_MINUTES=9              time limit of the benchmarks; skips the parts that do not end in time
#   TEST_ARGS, BENCH_ARGS        further arguments of pytest and of benchmarks/kernels/bench.py
#
# Packages that this python3 lacks are installed from .gpu-wheels (`make gpu-wheels`, on a machine with
# a network) into .gpu-site, which only this script uses. Without that folder, the kernel tests (if
# pytest is there) and the kernel benchmarks run.
set -uo pipefail
cd "$(dirname "$0")/.."

python="${1:-python3}"
parts="${PARTS:-tests engine bench}"
say() { echo "gpu: $*"; }
has() { "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)"; }

if ! has torch || ! has triton; then
    say "$python has no torch or no triton; set PYTHON= to one that has both (torch >= 2.11, triton >= 3.6)"
    exit 1
fi
export PYTHONPATH="$PWD/.gpu-site:$PWD/engine:$PWD/kernels:$PWD/kv_transfer:$PWD/benchmarks"
gpu="$("$python" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")')"
say "${gpu:-no GPU}; $("$python" -c 'import sys, torch, triton; print("python", sys.version.split()[0], "torch", torch.__version__, "triton", triton.__version__)')"

# Install missing packages from the wheels.
missing=()
while read -r distribution module; do
    has "$module" || missing+=("$distribution")
done < <(sed 's/#.*//' hack/gpu-wheels.txt | awk 'NF')
if [ "${#missing[@]}" -gt 0 ]; then
    if [ -d .gpu-wheels ]; then
        say "installing into .gpu-site: ${missing[*]}"
        for distribution in "${missing[@]}"; do # one by one: a missing wheel does not stop the others
            "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --find-links .gpu-wheels \
                --target .gpu-site --upgrade "$distribution" || say "no wheel of $distribution; tests that need it will fail"
        done
    else
        say "missing: ${missing[*]}; run 'make gpu-wheels' on a machine with a network and copy the folder .gpu-wheels here"
    fi
fi

failed=()
timed() { # name, command...
    local name="$1" start=$SECONDS
    shift
    say "--- $name"
    "$@" || failed+=("$name")
    say "--- $name: $((SECONDS - start)) s"
}

run_pytest() {
    local processes=()
    # Compiling kernels takes most of the time.
    has xdist && [ -n "$gpu" ] && processes=(-n "$((($(nproc) + 1) / 2))")
    # shellcheck disable=SC2086
    "$python" -m pytest -v -p no:cacheprovider --tb=short "${processes[@]}" "$@" ${TEST_ARGS:-}
    local status=$?
    [ "$status" -eq 5 ] && status=0 # nothing was selected
    return "$status"
}

for part in $parts; do
    case "$part" in
    tests)
        if has pytest; then
            timed "kernel tests" run_pytest tests/unit/kernels
        else
            say "kernel tests need pytest"
            failed+=("kernel tests")
        fi
        ;;
    engine)
        mapfile -t files < <(grep -rlE "mark\.gpu\b" tests --include='test_*.py' | grep -v '^tests/unit/kernels/' | sort)
        if [ "${#files[@]}" -eq 0 ]; then
            say "no engine test is marked gpu"
        elif has msgspec && has zmq && has pytest; then
            timed "engine on the GPU" run_pytest "${files[@]}" -m gpu
        else
            say "engine tests need msgspec, pyzmq and pytest"
            failed+=("engine on the GPU")
        fi
        ;;
    tune)
        timed "tune" "$python" benchmarks/kernels/tune.py --minutes "${TUNE_MINUTES:-6}"
        ;;
    bench)
        quick=""
        [ -n "$gpu" ] || quick="--quick"
        # shellcheck disable=SC2086
        timed "benchmarks" "$python" benchmarks/kernels/bench.py $quick --minutes "${BENCH_MINUTES:-9}" ${BENCH_ARGS:-}
        ;;
    *)
        say "unknown part $part; choose from: tests, engine, tune, bench"
        exit 2
        ;;
    esac
done
if [ "${#failed[@]}" -gt 0 ]; then
    say "failed: ${failed[*]}"
    exit 1
fi
say "all done in $SECONDS s${gpu:+ on $gpu}"
[ -n "$gpu" ] || say "this machine has no GPU: tests that need one were skipped"
