#!/bin/bash
# Installs the peers that `make bench` compares with, each into a virtual environment of its own
# below ${TENSORFERRY_BENCH:-~/.cache/tensorferry-bench}/peers, in the versions that were measured.
# Takes some minutes and 3 GB. What does not install is said at the end, and the rest is measured.
#
#     benchmarks/serving/install_peers.sh [NAME ...]        (PYTHON=python3.11 by default)
#
# A stamp beside each environment holds the requirements that it was made from.
set -u
root=${TENSORFERRY_BENCH:-$HOME/.cache/tensorferry-bench}/peers
python=${PYTHON:-python3.11}
engine="onnxruntime==1.31.1"
failed=()

declare -A requirements=(
    # PyTriton's wheel carries the tritonserver binary, with its Python backend and stubs.
    [triton]="nvidia-pytriton==0.7.0 $engine numpy<2"
    # With a newer uvloop MLServer's worker finds no event loop.
    [mlserver]="mlserver==1.7.1 $engine uvloop<0.22"
    [mosec]="mosec==0.9.8 $engine numpy msgpack"
    [litserve]="litserve==0.2.19 $engine numpy"
    [bentoml]="bentoml==1.4.39 $engine numpy"
    [ray]="ray[serve,serve-grpc]==2.60.0 $engine numpy"
)

install() {
    local name=$1 wanted=${requirements[$1]}
    local stamp="$root/$name.requirements"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        echo "$name: is installed"
        return 0
    fi
    echo "$name: installing $wanted ..."
    rm -rf "${root:?}/$name" "$stamp"
    # shellcheck disable=SC2086  # the requirements are words
    "$python" -m venv "$root/$name" &&
        "$root/$name/bin/python" -m pip install --disable-pip-version-check --quiet $wanted &&
        echo "$wanted" >"$stamp"
}

mkdir -p "$root"
if ! command -v "$python" >/dev/null; then
    echo "$python is not here: the peers' wheels want Python 3.11; try PYTHON=python3" >&2
    exit 1
fi
[ $# -gt 0 ] || set -- "${!requirements[@]}"
for name in "$@"; do
    if [ -z "${requirements[$name]:-}" ]; then
        echo "$name is none of the peers: ${!requirements[*]}" >&2
        exit 2
    fi
    install "$name" || failed+=("$name")
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "did not install: ${failed[*]}" >&2
    exit 1
fi
