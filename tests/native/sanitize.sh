#!/bin/sh
# Runs tests on a C++ core built with AddressSanitizer and UndefinedBehaviorSanitizer, without touching the installed one.
#   sh tests/native/sanitize.sh                      the tests that reach the core, less whole recordings and traces
#   sh tests/native/sanitize.sh -m slow tests/planner/test_native_fuzz.py
# SANITIZE=thread takes ThreadSanitizer instead.
set -eu
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
SANITIZE=${SANITIZE:-address,undefined}
OUT=build/sanitize-$SANITIZE
mkdir -p "$OUT"

INCLUDE=$($PYTHON -m nanobind --include_dir)
HEADERS=$($PYTHON -c "import sysconfig; print(sysconfig.get_path('include'))")
FLAGS="-std=c++20 -O1 -g -fPIC -fvisibility=hidden -ffp-contract=off -fno-omit-frame-pointer -fsanitize=$SANITIZE"
case $SANITIZE in *undefined*) FLAGS="$FLAGS -fno-sanitize-recover=all" ;; esac
g++ $FLAGS -fno-strict-aliasing -DNB_COMPACT_ASSERTIONS -shared -o "$OUT/_native.so" \
    -I"$INCLUDE" -I"$HEADERS" -I"$INCLUDE/../ext/robin_map/include" \
    moe_rl/csrc/*.cpp "$INCLUDE/../src/nb_combined.cpp" -pthread

# Puts the sanitized core in place of the installed one before any test imports it.
cat > "$OUT/sanitized_core.py" <<'PLUGIN'
import importlib.util
import pathlib
import sys

import moe_rl

path = pathlib.Path(__file__).with_name("_native.so")
spec = importlib.util.spec_from_file_location("moe_rl._native", path)
core = importlib.util.module_from_spec(spec)
sys.modules["moe_rl._native"] = moe_rl._native = core
spec.loader.exec_module(core)
PLUGIN

case $SANITIZE in thread) RUNTIME=libtsan.so ;; *) RUNTIME=libasan.so ;; esac
if [ $# -eq 0 ]; then
    # Whole steps at full effort take a hundred times as long here and run the same lines as the small ones.
    for name in exact_split forecast locality lplb milp_visits moe_rl native_fuzz native_planner outlook predict relayout variants; do
        set -- "$@" "tests/planner/test_$name.py"
    done
    set -- "$@" tests/core/test_native.py tests/core/test_reduce.py tests/routes/test_codec.py tests/routes/test_fuzz.py tests/simulators/test_token_routes.py \
        -k "not real_routing and not synthetic_routing and not most_of_the_rest"
fi
# Leaks: the interpreter itself never frees everything, so leak detection would only report Python.
LD_PRELOAD="$(g++ -print-file-name=$RUNTIME) $(g++ -print-file-name=libstdc++.so)" \
ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=ignore_noninstrumented_modules=1 \
OMP_NUM_THREADS=1 PYTHONPATH="$OUT" "$PYTHON" -m pytest -q -p sanitized_core "$@"
