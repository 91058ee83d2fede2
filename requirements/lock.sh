#!/bin/sh
# Compile the lock files: every package is pinned with its hashes, without index addresses.
# All but the last eleven share one solution, so that the tested versions are those that run
# (tritonclient, which the tests use, requires protobuf below 7).
set -eu
cd "$(dirname "$0")"
compile() {
    "${UV:-uv}" pip compile --quiet --no-annotate --python-version 3.11 --generate-hashes \
        --no-emit-index-url --no-emit-find-links --custom-compile-command "make locks" "$@"
}
all=$(mktemp)
excluded=$(mktemp)
trap 'rm -f "$all" "$excluded"' EXIT
# The package of the sentence encoder requires it, with torch, to run the model.
echo sentence-transformers >"$excluded"
compile --universal dev.in cpu.in plots.in docs.in fuzz.in embeddings.in --excludes "$excluded" --output-file "$all"
for name in cpu gpu dev plots docs fuzz embeddings; do
    compile --universal "$name.in" --excludes "$excluded" --constraints "$all" --output-file "$name.lock"
done
# For Python 3.11 only, because some of these versions have no wheels for newer ones.
compile oldest.in --output-file oldest.lock
for name in kserve docling text manifests ray release exporters torch; do
    compile --universal "$name.in" --output-file "$name.lock"
done
# Without dependencies: only files of these packages are used.
for name in real-models providers; do
    compile --universal --no-deps "$name.in" --output-file "$name.lock"
done
