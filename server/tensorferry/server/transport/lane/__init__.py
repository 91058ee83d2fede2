"""The lane: the transport on a completion queue of grpc's core."""
