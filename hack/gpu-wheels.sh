#!/usr/bin/env bash
# Downloads the wheels that `make gpu` may need into .gpu-wheels, on any machine with a network: about
# 30 MB, for CPython 3.12 on x86-64 Linux. Copy the folder to the GPU machine, which needs no network.
#
#   hack/gpu-wheels.sh [PYTHON]     PYTHON: an interpreter with pip, python3 by default
set -euo pipefail
cd "$(dirname "$0")/.."

python="${1:-python3}"
folder=.gpu-wheels
names="$(sed 's/#.*//' hack/gpu-wheels.txt | awk 'NF { print $1 }')"

platforms=()
for glibc in 2_39 2_35 2_34 2_31 2_28 2_27 2_26 2_24 2_17; do # pip matches each literally
    platforms+=(--platform "manylinux_${glibc}_x86_64")
done
rm -rf "$folder"
# shellcheck disable=SC2086
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --implementation cp --python-version 3.12 "${platforms[@]}" --platform manylinux2014_x86_64 \
    --constraint constraints.txt --dest "$folder" $names
echo "$(find "$folder" -name '*.whl' | wc -l) wheels in $folder, $(du -sh "$folder" | cut -f1)"
