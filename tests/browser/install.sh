#!/bin/sh
# Installs a headless Chromium into the folder $1: chromium, its libraries, and a font.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
if [ "$(uname -m)" != x86_64 ]; then
    echo "no headless Chromium is packaged for $(uname -m): the status page is not tested in a browser" >&2
    exit 0
fi
mkdir -p "$1"
cp "$here/package.json" "$here/unpack.js" "$1"
cd "$1"
# It is unpacked here: its own script wants a newer Node, and unpacks where all users may write.
npm install --silent --ignore-scripts --no-package-lock --no-audit --no-fund
node unpack.js
rm -rf node_modules
# The font of the package alone: a page looks the same everywhere, and is not empty where there are no fonts.
cat >fonts.conf <<END
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <dir>$PWD/fonts</dir>
  <cachedir>$PWD/fonts/cache</cachedir>
  <alias><family>system-ui</family><prefer><family>Open Sans</family></prefer></alias>
</fontconfig>
END
if ! LD_LIBRARY_PATH="$PWD/lib" ldd ./chromium >libraries.txt || grep "not found" libraries.txt; then
    echo "Chromium lacks these libraries: apt-get install libnss3 (Debian, Ubuntu) or dnf install nss (Fedora)" >&2
    exit 1
fi
