"""Protobuf messages as bytes: decompressed, bounded and checked before they are parsed."""
