#!/bin/sh
# Fuzzes the planner's C++ with libFuzzer, AddressSanitizer and UndefinedBehaviorSanitizer for so many seconds.
#   sh tests/native/fuzz.sh 3600
# Needs clang with its runtime (Debian: clang, libclang-rt-14-dev). The corpus stays in build/fuzz/corpus.
set -eu
cd "$(dirname "$0")/../.."
OUT=build/fuzz
mkdir -p "$OUT/corpus"
clang++ -std=c++20 -O1 -g -ffp-contract=off -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
    -o "$OUT/fuzz_planner" -Imoe_rl/csrc tests/native/fuzz_planner.cpp $(grep -LE 'nanobind|bindings' moe_rl/csrc/*.cpp) -pthread
exec "$OUT/fuzz_planner" -max_total_time="${1:-60}" -max_len=4096 -print_final_stats=1 -artifact_prefix="$OUT/" \
    "$OUT/corpus"
