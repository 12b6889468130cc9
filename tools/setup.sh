#!/usr/bin/env bash
# Installs the Debian packages that are missing. Usage: tools/setup.sh GROUP...   Groups: build test python ci aarch64
# Asks dpkg first, so that a machine that has everything needs neither root nor the network.
set -euo pipefail

declare -A packages=(
  [build]="g++ cmake ninja-build pkg-config libhwy-dev libtbb-dev libcli11-dev nlohmann-json3-dev libfmt-dev libzip-dev"
  [test]="libgtest-dev python3"
  [python]="python3-dev python3-venv"
  [ci]="clang libclang-rt-dev clang-format"
  [aarch64]="g++-aarch64-linux-gnu qemu-user libhwy-dev:arm64 libtbb-dev:arm64 libfmt-dev:arm64 libzip-dev:arm64 libgtest-dev:arm64"
)

wanted=()
for group in "$@"; do
  if [[ -z "${packages[$group]:-}" ]]; then
    echo "setup: no group '$group'; there are: ${!packages[*]}" >&2
    exit 2
  fi
  read -ra names <<<"${packages[$group]}"
  wanted+=("${names[@]}")
done

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  echo "setup: this is not Debian, so nothing was installed. Needed, by Debian's names: ${wanted[*]}" >&2
  exit 0
fi

missing=()
for name in "${wanted[@]}"; do
  status=$(dpkg-query -W -f='${db:Status-Status}\n' "$name" 2>/dev/null | head -n 1) || true
  [[ "$status" == installed ]] || missing+=("$name")
done
if ((${#missing[@]} == 0)); then
  exit 0
fi

# A package of another architecture is only found where dpkg has been told of that architecture.
new=""
for name in "${missing[@]}"; do
  if [[ $name == *:* ]] && ! { dpkg --print-architecture && dpkg --print-foreign-architectures; } | grep -x "${name#*:}" >/dev/null; then new=${name#*:}; fi
done

as_root=()
if ((EUID != 0)); then
  if ! command -v sudo >/dev/null; then
    echo "setup: not root and no sudo. As root, run: ${new:+dpkg --add-architecture $new && apt-get update && }apt-get install ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi
echo "setup: installing ${missing[*]}"
[[ -z "$new" ]] || "${as_root[@]}" dpkg --add-architecture "$new"
"${as_root[@]}" apt-get -qq update
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install "${missing[@]}" >/dev/null
