#!/bin/sh
# Puts Debian's nginx below a folder, without installing it: tests/deploy/nginx.sh FOLDER
# Which version it is, Debian's security updates decide; apt checks the signatures, with lists of its own.
set -eu
folder=$1
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || {
    echo "nginx comes as Debian's package: this machine has no apt-get and dpkg-deb" >&2
    exit 1
}
rm -rf "$folder"
mkdir -p "$folder/apt/lists/partial" "$folder/apt/archives/partial"
cd "$folder"
own="-o Dir::State::lists=$PWD/apt/lists -o Dir::Cache=$PWD/apt -o APT::Sandbox::User="
# shellcheck disable=SC2086  # options are words
apt-get $own -qq update
# shellcheck disable=SC2086
apt-get $own -qq download nginx
dpkg-deb -x nginx_*.deb .
rm -rf apt nginx_*.deb
./usr/sbin/nginx -V 2>/dev/null || {
    echo "nginx does not run here: $(ldd usr/sbin/nginx | grep 'not found')" >&2
    exit 1
}
