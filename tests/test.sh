#!/usr/bin/env bash
# test.sh: installs what is missing, builds, and runs every test; one summary at the end.
#
#     bash tests/test.sh [--only PART[,PART...]]
#
# Parts, in the order they run:
#     c           the C tests with every kernel set this machine can run; a warning is an error
#     sanitizers  the same under address, undefined-behaviour and thread sanitizers
#     cuda        the CUDA kernels compiled for every architecture, where nvcc is installed
#     fuzz        each libFuzzer target for a short while (FUZZ_SECONDS, default 20)
#     python      the wheel, then the package's tests with PyTorch and flash-linear-attention
#     docs        every code block of the documents
#     tree        formatting, shell scripts, presets, paths
#
# Reports and logs are left in build/test-reports. Exits with 0 only when nothing failed.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
all_parts="c sanitizers cuda fuzz python docs tree"
parts=$all_parts
case ${1:-} in
'') ;;
--only)
    parts=${2//,/ }
    for part in $parts; do
        case " $all_parts " in
        *" $part "*) ;;
        *)
            echo "test.sh: unknown part '$part'; known are: $all_parts" >&2
            exit 2
            ;;
        esac
    done
    [ -n "$parts" ] || exit 2
    ;;
*)
    sed -n '2,15s/^# \{0,1\}//p' "$0"
    [ "$1" = --help ] && exit 0
    exit 2
    ;;
esac

# The caller's settings must not change what is tested.
unset FLASH_KDA_CPU_ISA FLASH_KDA_PRECISION FLASH_KDA_NUM_THREADS FLASH_KDA_CUDA_PATH
unset CFLAGS LDFLAGS OMP_NUM_THREADS PYTHONPATH
# Outside of the cuda part kernels that nothing here can run would only take time to compile.
nvidia-smi -L >/dev/null 2>&1 || export FLASH_KDA_CUDA=OFF
export OMP_WAIT_POLICY=passive # tests run side by side: a thread that waits must not spin
venv=$root/build/venv
python=$venv/bin/python
reports=$root/build/test-reports
rm -rf "$reports"
mkdir -p "$reports"
: >"$reports/steps"
jobs=$(getconf _NPROCESSORS_ONLN)
start=$SECONDS

wants() {
    case " $parts " in
    *" $1 "*) return 0 ;;
    esac
    return 1
}

note() {
    printf '\n== [%3d s] %s\n' "$((SECONDS - start))" "$1"
}

# step LABEL REPORT COMMAND...: runs it, shows its output and notes how it ended. REPORT is the
# JUnit file that the command writes, or "-" for a step that only builds: its output goes to a log,
# of which the end is shown when it fails.
step() {
    local label=$1 report=$2 status=0 began=$SECONDS
    shift 2
    note "$label"
    if [ "$report" = - ]; then
        local log=$reports/${label//[^A-Za-z0-9]/-}.log
        "$@" >"$log" 2>&1 </dev/null || { status=$? && tail -n 40 "$log"; }
    else
        "$@" </dev/null || status=$?
    fi
    printf '%s\t%s\t%s\t%s\n' "$status" "$((SECONDS - began))" "$label" "$report" \
        >>"$reports/steps"
    return "$status"
}

configure_and_build() {
    local preset=$1
    shift
    cmake --preset "$preset" "$@" && cmake --build --preset "$preset" --parallel "$jobs"
}

# ctest_step LABEL PRESET NAME [CTEST ARGUMENT...]
ctest_step() {
    local label=$1 preset=$2 report=$reports/$3.xml
    shift 3
    step "$label" "$report" \
        ctest --preset "$preset" --parallel "$jobs" --output-junit "$report" \
        --test-output-size-passed 10000000 --test-output-size-failed 10000000 "$@" || true
}

# pytest_step LABEL NAME PATH...
pytest_step() {
    local label=$1 report=$reports/$2.xml
    shift 2
    step "$label" "$report" \
        "$python" -m pytest -q -rs --junitxml "$report" "$@" || true
}

# ---- What the parts need ------------------------------------------------------------------------

needs="compiler cmake ninja pkg-config cjson python"
if wants c || wants sanitizers || wants cuda || wants tree; then needs+=" cmocka"; fi
if wants sanitizers || wants fuzz || wants tree; then needs+=" clang"; fi
if wants python || wants docs; then needs+=" python-headers"; fi
note "Dependencies: $needs"
# shellcheck disable=SC2086 # a list of words
bash scripts/install_dependencies.sh $needs

venv_job=
if wants python || wants docs || wants tree; then
    # Downloads run while the C parts compile. PyTorch is not needed for the tree alone.
    environment=tree
    if wants python || wants docs; then environment=all; fi
    bash tests/prepare_venv.sh "$venv" "$environment" >"$reports/venv.log" 2>&1 </dev/null &
    venv_job=$!
    trap 'kill "$venv_job" 2>/dev/null || true' EXIT
fi

# ---- C ------------------------------------------------------------------------------------------

if wants c; then
    if step "build" - configure_and_build test; then
        ctest_step "C tests" test ctest
    fi
fi
if wants sanitizers; then
    if step "build for asan, ubsan" - configure_and_build asan-ubsan; then
        ctest_step "C tests, asan and ubsan" asan-ubsan ctest-asan-ubsan \
            --exclude-regex "^install$" # its consumers are built without sanitizers
    fi
    if step "build for tsan" - configure_and_build tsan; then
        # Archer tells the thread sanitizer what OpenMP's barriers order.
        OMP_TOOL_LIBRARIES=$(clang -print-resource-dir)/../../libarcher.so \
            ctest_step "C tests, tsan" tsan ctest-tsan --tests-regex '^(unit|cpu)_'
    fi
fi
if wants cuda; then
    if command -v "${CUDACXX:-nvcc}" >/dev/null; then
        if step "build with CUDA kernels" - configure_and_build cuda; then
            ctest_step "C tests of the CUDA build" cuda ctest-cuda --tests-regex cuda
        fi
    else
        note "CUDA kernels are not compiled: no nvcc on this machine"
    fi
fi
if wants fuzz; then
    if step "build for fuzzing" - configure_and_build fuzz; then
        ctest_step "fuzz targets" fuzz ctest-fuzz
    fi
fi

# ---- Python -------------------------------------------------------------------------------------

build_wheel() {
    rm -rf "$reports/wheel" "$reports/wheelhouse"
    "$python" -m pip wheel --no-deps --wheel-dir "$reports/wheel" "$root" &&
        PATH="$venv/bin:$PATH" "$python" -m auditwheel repair \
            --wheel-dir "$reports/wheelhouse" "$reports/wheel"/*.whl &&
        "$python" -m pip install --force-reinstall --no-deps "$reports/wheelhouse"/*.whl
}

if [ -n "$venv_job" ]; then
    note "Python environment (log: build/test-reports/venv.log)"
    if ! wait "$venv_job"; then
        tail -n 30 "$reports/venv.log"
        printf '1\t0\tPython environment\t-\n' >>"$reports/steps"
        parts=none
    fi
    venv_job=
    trap - EXIT
fi
if wants python; then
    if step "wheel: build, audit, install" - build_wheel; then
        FLASH_KDA_WHEEL=$(echo "$reports/wheelhouse"/*.whl) \
            pytest_step "wheel" pytest-install tests/install
        pytest_step "Python package" pytest tests/python
    fi
fi
if wants docs; then
    pytest_step "code blocks of the documents" pytest-docs tests/docs
fi
if wants tree; then
    pytest_step "tree" pytest-tree tests/tree
fi

note "Summary"
python3 tests/gpu/gpu_record.py || true # a report: it does not decide
python3 tests/summary.py "$reports/steps"
