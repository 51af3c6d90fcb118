#!/usr/bin/env bash
# install_dependencies.sh: makes sure that the named things work on this machine.
#
#     bash scripts/install_dependencies.sh [--check] NEED...
#
# Each is tried first: a program is compiled and run, a module imported. Only what fails is
# installed, with apt-get as root; nothing is called when nothing is missing. Without root or
# without apt-get the script names the packages to install and exits with 1, and so does --check.
set -euo pipefail

needs="compiler cmake ninja pkg-config cjson cmocka python python-headers clang valgrind"

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# can_build COMPILER SOURCE [FLAG...]: the program compiles, links, runs and returns 0.
can_build() {
    local compiler=$1 source=$2
    shift 2
    printf '%s\n' "$source" >"$scratch/probe.c"
    "$compiler" -o "$scratch/probe" "$scratch/probe.c" "$@" && "$scratch/probe"
}

python_can() {
    python3 -c "$1"
}

# works NEED: silent; true when it can be used as it is.
works() {
    case $1 in
    compiler)
        can_build "${CC:-cc}" '#include <math.h>
#include <omp.h>
int main(int argc, char **argv) { (void)argv; return sqrt(argc) + omp_get_max_threads() < 1; }' \
            -std=c11 -fopenmp -lm
        ;;
    cmake)
        local version
        version=$(cmake --version | sed -n 's/^cmake version \([0-9]*\)\.\([0-9]*\).*/\1 \2/p')
        [ -n "$version" ] || return 1
        # shellcheck disable=SC2086 # two numbers, on purpose
        set -- $version
        [ "$1" -gt 3 ] || { [ "$1" -eq 3 ] && [ "$2" -ge 25 ]; }
        ;;
    ninja) ninja --version ;;
    pkg-config) pkg-config --version ;;
    cjson)
        can_build "${CC:-cc}" '#include <cjson/cJSON.h>
int main(void) { cJSON_Delete(cJSON_Parse("{}")); return 0; }' -lcjson
        ;;
    cmocka)
        can_build "${CC:-cc}" '#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>
static void nothing(void **state) { (void)state; }
int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(nothing)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}' -lcmocka
        ;;
    python) python_can 'import sys, venv, ensurepip; assert sys.version_info >= (3, 10)' ;;
    python-headers)
        python_can 'import os, sysconfig
assert os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h"))'
        ;;
    clang)
        can_build clang 'int main(void) { return 0; }' -fsanitize=address,undefined -fopenmp &&
            printf '%s\n' 'int LLVMFuzzerTestOneInput(const unsigned char *d, unsigned long n);
int LLVMFuzzerTestOneInput(const unsigned char *d, unsigned long n) { return n && d[0] ? 0 : 0; }' \
                >"$scratch/fuzz.c" &&
            clang -fsanitize=fuzzer,address -o "$scratch/fuzz" "$scratch/fuzz.c"
        ;;
    valgrind) valgrind --version ;;
    esac >/dev/null 2>&1
}

# package_for NEED MANAGER
package_for() {
    case $2:$1 in
    apt:compiler) echo build-essential ;;
    apt:ninja) echo ninja-build ;;
    apt:cjson) echo libcjson-dev ;;
    apt:cmocka) echo libcmocka-dev ;;
    apt:python) echo python3 python3-venv ;;
    apt:python-headers) echo python3-dev ;;
    apt:clang) echo clang libclang-rt-dev libomp-dev ;;
    dnf:compiler) echo gcc ;;
    dnf:ninja) echo ninja-build ;;
    dnf:pkg-config) echo pkgconf-pkg-config ;;
    dnf:cjson) echo cjson-devel ;;
    dnf:cmocka) echo libcmocka-devel ;;
    dnf:python) echo python3 ;;
    dnf:python-headers) echo python3-devel ;;
    dnf:clang) echo clang compiler-rt libomp-devel ;;
    pacman:compiler) echo gcc ;;
    pacman:pkg-config) echo pkgconf ;;
    pacman:python | pacman:python-headers) echo python ;;
    pacman:clang) echo clang compiler-rt openmp ;;
    brew:compiler) echo libomp ;;
    brew:python | brew:python-headers) echo python ;;
    brew:clang) echo llvm libomp ;;
    *) echo "$1" ;;
    esac
}

check_only=
if [ "${1:-}" = --check ]; then
    check_only=1
    shift
fi
if [ $# -eq 0 ]; then
    sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    echo "NEED is one of: $needs"
    exit 2
fi

missing=()
for need in "$@"; do
    case " $needs " in
    *" $need "*) ;;
    *)
        echo "install_dependencies.sh: unknown need '$need'; known are: $needs" >&2
        exit 2
        ;;
    esac
    works "$need" || missing+=("$need")
done
[ ${#missing[@]} -gt 0 ] || exit 0

manager=
for name in apt-get dnf pacman brew; do
    if command -v "$name" >/dev/null; then
        manager=${name%-get}
        break
    fi
done
packages=
for need in "${missing[@]}"; do
    packages+=" $(package_for "$need" "${manager:-apt}")"
done

case $manager in
apt) install="apt-get install$packages" ;;
dnf) install="dnf install$packages" ;;
pacman) install="pacman -S --needed$packages" ;;
brew) install="brew install$packages" ;;
*) install="install, under the names of your system:$packages" ;;
esac

if [ -n "$check_only" ] || [ "$manager" != apt ] || [ "$(id -u)" -ne 0 ]; then
    echo "Missing or not working: ${missing[*]}. As root, please run:" >&2
    echo "    $install" >&2
    exit 1
fi

echo "Installing:$packages"
log=$root/build/install.log
mkdir -p "$root/build"
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086 # a list of packages
if ! { apt-get update && apt-get install -y --no-install-recommends $packages; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    echo "The installation failed; the whole of its output is in $log" >&2
    exit 1
fi
for need in "${missing[@]}"; do
    works "$need" || {
        echo "$need does not work even after: $install (see $log)" >&2
        exit 1
    }
done
