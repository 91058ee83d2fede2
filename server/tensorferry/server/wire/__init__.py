"""Protobuf messages as bytes: unpacked, bounded and checked before they are parsed."""
