#!/bin/sh
# Builds the client in Java into the folder $1: Maven fetches protoc, its plugin and the libraries.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
mkdir -p "$1"
cd "$1"
rm -rf lib generated classes
mkdir generated classes
case $(uname -m) in
aarch64 | arm64) platform=linux-aarch_64 ;;
*) platform=linux-$(uname -m) ;;
esac
mvn -q -B -f "$here/pom.xml" org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies \
    "-DoutputDirectory=$PWD/lib" "-Dplatform=$platform"
chmod +x lib/*.exe
out=$PWD
(
    cd "$root/protos"
    "$out"/lib/protoc-[0-9]*.exe -I. "--plugin=protoc-gen-grpc-java=$(echo "$out"/lib/protoc-gen-grpc-java-*.exe)" \
        "--java_out=$out/generated" "--grpc-java_out=$out/generated" --grpc-java_opt=@generated=omit \
        tensorferry/protos/*.proto
)
# The generated code is a hundred thousand lines: the short-lived compiler is faster without optimizing itself.
javac -J-XX:TieredStopAtLevel=1 -J-XX:+UseSerialGC -proc:none -g:none -cp 'lib/*' -d classes \
    generated/*/*.java "$here"/*.java
