"""The gRPC transports, and what both share: admission, limits, channel arguments."""
