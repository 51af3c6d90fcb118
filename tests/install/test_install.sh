#!/usr/bin/env bash
# test_install.sh BUILD WORK CMAKE CC: what `cmake --install BUILD` lays down works for others.
set -euo pipefail

build=$1 work=$2 cmake=$3 cc=$4
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
example=$root/examples/forward.c

if grep -q '^FLASH_KDA_SANITIZE:[A-Z]*=.' "$build/CMakeCache.txt"; then
    echo "skipped: the consumers here are built without this build's sanitizers"
    exit 77
fi

lines=$(wc -l <"$example")
[ "$lines" -le 40 ] || { echo "forward.c has $lines lines, wanted 40 or fewer" >&2; exit 1; }

rm -rf "$work"
mkdir -p "$work"
"$cmake" --install "$build" --prefix "$work/first" --component library >/dev/null
"$cmake" --install "$build" --prefix "$work/first" --component development >/dev/null
mv "$work/first" "$work/moved" # nothing may remember where it was installed
prefix=$work/moved
pc=$(find "$prefix" -name flash_kda.pc)
libdir=$(dirname "$(dirname "$pc")")
export PKG_CONFIG_PATH=${pc%/*}

check() { # check PROGRAM: it runs and says which kernel did the work
    local output
    output=$(LD_LIBRARY_PATH=$libdir "$1")
    echo "$(basename "$1"): $output"
    case $output in
    cpu/*" 20 tokens, RMS error "*) ;;
    *) return 1 ;;
    esac
}

# pkg-config, shared and static. Its answer is a list of words quoted for a shell: folders may have
# spaces in their names.
flags=() libs=()
eval "flags=($(pkg-config --cflags --libs flash_kda))"
"$cc" -std=c11 -Wall -Wextra -Werror "$example" "${flags[@]}" -lm \
    -o "$work/pkg_config_shared"
check "$work/pkg_config_shared"
mkdir "$work/archive_only"
cp "$libdir/libflashkda.a" "$work/archive_only/"
eval "flags=($(pkg-config --cflags flash_kda))"
eval "libs=($(pkg-config --static --libs-only-l --libs-only-other flash_kda))"
"$cc" -std=c11 "$example" "${flags[@]}" -L"$work/archive_only" "${libs[@]}" \
    -o "$work/pkg_config_static"
check "$work/pkg_config_static"
if ldd "$work/pkg_config_static" | grep -q flashkda; then
    echo "pkg_config_static: linked the shared library" >&2
    exit 1
fi

# Nothing but the public names may be exported.
if nm -D --defined-only "$libdir/libflashkda.so" | awk '$2 != "A" {print $3}' |
    grep -v '^fkda_'; then
    echo "libflashkda.so: exports names outside fkda_" >&2
    exit 1
fi
exported=$(nm -D --defined-only "$libdir/libflashkda.so" | awk '$2 == "T" {print $3}' | sort)
declared=$(sed -n 's/^FKDA_API.*[ *]\(fkda_[a-z_]*\)(.*/\1/p' "$root/include/flash_kda.h" | sort)
[ "$exported" = "$declared" ] || {
    diff <(echo "$declared") <(echo "$exported") >&2 || true
    echo "libflashkda.so: exports (>) differ from the header's declarations (<)" >&2
    exit 1
}

# CMake: C with both libraries; C++ alone with the shared one.
"$cmake" -S "$here/consumer" -B "$work/consumer" -DCMAKE_PREFIX_PATH="$prefix" \
    -DCMAKE_C_COMPILER="$cc" -DEXAMPLE="$example" >"$work/consumer.log"
"$cmake" --build "$work/consumer" >>"$work/consumer.log" || { cat "$work/consumer.log"; exit 1; }
check "$work/consumer/cmake_shared"
check "$work/consumer/cmake_static"

if command -v c++ >/dev/null; then
    "$cmake" -S "$here/consumer_cxx" -B "$work/consumer_cxx" -DCMAKE_PREFIX_PATH="$prefix" \
        >"$work/consumer_cxx.log"
    "$cmake" --build "$work/consumer_cxx" >>"$work/consumer_cxx.log" ||
        { cat "$work/consumer_cxx.log"; exit 1; }
    output=$(LD_LIBRARY_PATH=$libdir "$work/consumer_cxx/cmake_cxx")
    echo "cmake_cxx: $output"
    [ "$output" = "$(sed -n 's/^#define FKDA_VERSION_STRING "\(.*\)"/\1/p' \
        "$root/include/flash_kda.h")" ]
else
    echo "cmake_cxx: not run, there is no C++ compiler here"
fi
