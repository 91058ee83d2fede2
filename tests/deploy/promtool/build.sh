#!/bin/sh
# Builds promtool into the folder $1, in the folder $2, from the versions in go.mod. Of Prometheus it leaves out what
# asks clouds for the servers there are, which takes most of the time to compile, and which rules do not need.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1" "$2"
bin=$(cd "$1" && pwd)
cd "$2"
cp "$here"/go.mod "$here"/go.sum .
go mod download github.com/prometheus/prometheus
rm -rf prometheus
cp -r "$(go list -m -f '{{.Dir}}' github.com/prometheus/prometheus)" prometheus
chmod -R u+w prometheus
echo 'package plugins' >prometheus/plugins/plugins.go
go mod edit -replace github.com/prometheus/prometheus=./prometheus
GOBIN=$bin go install -ldflags='-s -w' tool
rm -rf prometheus
