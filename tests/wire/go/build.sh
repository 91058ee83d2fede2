#!/bin/sh
# Builds the client in Go into the folder $1 with the Python $2, which has grpcio-tools for its protoc.
# The generators come from go.mod too; the .proto files name no Go package, so it is said here.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
out=$1
python=$2
mkdir -p "$out"
cp "$here"/*.go "$here"/go.mod "$here"/go.sum "$out"
cd "$out"
out=$PWD
# -s -w: without what only a debugger needs.
GOBIN=$out go install -ldflags='-s -w' tool
cd "$root/protos"
set -- tensorferry/protos/*.proto
for proto in "$@"; do
    set -- "$@" "--go_opt=M$proto=wire/inference" "--go-grpc_opt=M$proto=wire/inference"
done
PATH=$out:$PATH "$python" -m grpc_tools.protoc -I. --go_opt=module=wire --go-grpc_opt=module=wire \
    "--go_out=$out" "--go-grpc_out=$out" "$@"
cd "$out"
go build -buildvcs=false -ldflags='-s -w' -o client .
# A client of HTTP, which needs no other module.
go build -buildvcs=false -ldflags='-s -w' -o http_client "$root/tests/wire/http/client.go"
