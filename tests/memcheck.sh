#!/usr/bin/env bash
# memcheck.sh [NAME...]: C tests under valgrind's memcheck, built for it in build/memcheck. Without
# names: the unit and program tests, and those of the kernels that valgrind knows the instructions
# of (portable and AVX2). Minutes; not part of tests/test.sh. Fails at the first finding.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/install_dependencies.sh compiler cmake ninja pkg-config cjson cmocka python valgrind
cmake --preset test -B build/memcheck -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    -DCMAKE_C_FLAGS_RELWITHDEBINFO="-O1 -g" >/dev/null
cmake --build build/memcheck >/dev/null
names=("$@")
if [ $# = 0 ]; then
    for path in build/memcheck/tests/{unit,tool,cpu}/test_*; do
        [ -x "$path" ] && [ -f "$path" ] || continue
        case $path in
        # Needs instructions that valgrind does not know, or loads a library of its own.
        *vec_math_avx512 | *prefill_bf16 | *unload) ;;
        *) names+=("$(basename "$path")") ;;
        esac
    done
fi
echo "kernel sets: $(valgrind -q build/memcheck/tools/flashkda/flashkda info | grep -i usable)"
export OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive # valgrind runs one thread at a time
for name in "${names[@]}"; do
    began=$SECONDS
    valgrind -q --leak-check=full --show-leak-kinds=definite --errors-for-leak-kinds=definite \
        --error-exitcode=9 build/memcheck/tests/*/"$name" >build/memcheck/"$name".log 2>&1 || {
        cat build/memcheck/"$name".log
        exit 1
    }
    passed=$(grep -c '^\[       OK' build/memcheck/"$name".log || true)
    skipped=$(grep '^\[  SKIPPED \] test' build/memcheck/"$name".log | sort -u | wc -l || true)
    echo "$name: $passed passed, $skipped skipped, no finding, $((SECONDS - began)) s"
done
