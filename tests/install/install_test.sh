#!/usr/bin/env bash
# Installs a build into a prefix, moves that, and lets the project in this folder find and use it: through CMake, then through pkg-config.
# Usage: install_test.sh CMAKE BUILD_DIR CXX VERSION [FLAG...]. The flags are what the library itself must be linked with (a sanitizer).
set -euo pipefail
cmake=$1 build=$2 cxx=$3 version=$4
flags=("${@:5}")
here=$(cd "$(dirname "$0")" && pwd)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$cmake" --install "$build" --prefix "$work/first" >/dev/null
prefix=$work/elsewhere
mv "$work/first" "$prefix"

"$cmake" -S "$here" -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER="$cxx" -DCMAKE_CXX_FLAGS="${flags[*]}" \
  -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF >/dev/null
"$cmake" --build "$work/build" >/dev/null
"$work/build/outside"

pkgconfig=$(dirname "$(find "$prefix" -name tercet.pc)")
export PKG_CONFIG_PATH=$pkgconfig
[[ $(pkg-config --modversion tercet) == "$version" ]]
read -ra compile < <(pkg-config --cflags tercet)
read -ra link < <(pkg-config --libs tercet)
"$cxx" -std=c++20 "${flags[@]}" "${compile[@]}" "$here/main.cc" -o "$work/by-pkg-config" "${link[@]}"
LD_LIBRARY_PATH=$(pkg-config --variable=libdir tercet) "$work/by-pkg-config"

[[ -n $(find "$prefix" -name LICENSE) ]] || { echo "the licence was not installed"; exit 1; }
headers=$(cd "$prefix/include" && find . -type f)
[[ $headers == ./tercet/tercet.hpp ]] || { echo "installed headers: $headers"; exit 1; }
if [[ -e $build/cli/tercet ]]; then
  [[ $("$prefix/bin/tercet" --version) == *"$version"* ]] || { echo "the installed command does not say version $version"; exit 1; }
fi
if grep -rlIF -e "$build" -e "$work/first" "$prefix"; then
  echo "these installed files name the folder they were built or first installed in"
  exit 1
fi
