#!/bin/sh
# Unpacks Triton's perf_analyzer and the libraries that it needs into the folder $1, with the Python $2.
#
# The binary is in the wheels of tritonclient up to 2.43.0. It is linked to CUDA's runtime, which it
# uses only for shared memory on a GPU, and to libb64. If the machine lacks libb64, it is taken from
# Debian's package; if that is not available either, the file `unavailable` says so.
set -eu
out=$1
python=$2
rm -rf "$out"
mkdir -p "$out/lib"
cd "$out"

wheel() {
    "$python" -m pip --disable-pip-version-check download -q --no-deps --only-binary :all: \
        --platform "$2" --dest wheels "$1"
}
wheel tritonclient==2.43.0 manylinux1_x86_64
wheel nvidia-cuda-runtime-cu12==12.9.79 manylinux2014_x86_64
"$python" - <<'END'
import pathlib, zipfile

for wheel in pathlib.Path("wheels").glob("*.whl"):
    archive = zipfile.ZipFile(wheel)
    for name in archive.namelist():
        if name.endswith("/bin/perf_analyzer"):
            pathlib.Path("perf_analyzer").write_bytes(archive.read(name))
        elif name.endswith("/libcudart.so.12"):
            pathlib.Path("lib/libcudart.so.12").write_bytes(archive.read(name))
END
rm -r wheels
chmod +x perf_analyzer

if ! LD_LIBRARY_PATH=lib ./perf_analyzer --version >/dev/null 2>&1; then
    if ! apt-get download -q libb64-0d; then
        apt-get update -q
        apt-get download -q libb64-0d
    fi >/dev/null 2>&1 || {
        echo "perf_analyzer needs libb64.so.0d: install it (libb64-0d on Debian and Ubuntu)" | tee unavailable >&2
        exit 0
    }
    dpkg-deb -x libb64-0d_*.deb package
    find package -name 'libb64.so*' -exec cp -P {} lib/ ';'
    rm -r package libb64-0d_*.deb
fi
LD_LIBRARY_PATH=lib ./perf_analyzer --version
