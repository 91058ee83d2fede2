#!/bin/sh
# Installs into the folder $1 what the client in Node is run with, beside the client.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
cp "$here"/*.js "$here"/package.json "$1"
cd "$1"
npm install --silent --no-package-lock --no-audit --no-fund
