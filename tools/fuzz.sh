#!/usr/bin/env bash
# Runs the fuzz target of every file reader for the given seconds, starting from its corpus. Usage: tools/fuzz.sh SECONDS
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:?seconds}

# An input may ask for no more memory than a small multiple of its size; the limits turn a reader that believes a lying header into a crash.
for format in safetensors npy npz; do
  found=$(mktemp -d)
  echo "fuzz: $format for $seconds s"
  "build/fuzz/tests/fuzz_$format" -max_total_time="$seconds" -rss_limit_mb=2048 -malloc_limit_mb=64 -max_len=8192 -print_final_stats=1 \
    -artifact_prefix="build/fuzz/$format-" "$found" "tests/fuzz/corpus/$format"
  rm -rf "$found"
done
