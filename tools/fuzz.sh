#!/usr/bin/env bash
# Runs every fuzz target that is built for the given seconds, starting from its corpus. Usage: tools/fuzz.sh SECONDS
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:?seconds}

ran=0
for target in build/fuzz/bin/fuzz_*; do
  name=$(basename "$target")
  found=$(mktemp -d)
  echo "fuzz: $name for $seconds s"
  "$target" -max_total_time="$seconds" -print_final_stats=1 -artifact_prefix=build/fuzz/ "$found" "tests/corpus/${name#fuzz_}"
  rm -rf "$found"
  ran=$((ran + 1))
done
((ran > 0))
