#!/bin/sh
# Puts a package of Debian below a folder, without installing it: tests/support/debian_package.sh FOLDER PACKAGE
# Which version it is, Debian's security updates decide; apt checks the signatures, with lists of its own.
set -eu
folder=$1 package=$2
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || {
    echo "$package comes as Debian's package: this machine has no apt-get and dpkg-deb" >&2
    exit 1
}
rm -rf "$folder"
mkdir -p "$folder/apt/lists/partial" "$folder/apt/archives/partial"
cd "$folder"
own="-o Dir::State::lists=$PWD/apt/lists -o Dir::Cache=$PWD/apt -o APT::Sandbox::User="
# shellcheck disable=SC2086  # options are words
apt-get $own -qq update
# shellcheck disable=SC2086
apt-get $own -qq download "$package"
dpkg-deb -x "${package}"_*.deb .
rm -rf apt "${package}"_*.deb
