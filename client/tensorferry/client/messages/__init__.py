"""Arguments, messages and results: arrays to protobuf and back."""
