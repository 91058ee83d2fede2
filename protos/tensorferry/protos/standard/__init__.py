"""Messages of the standard gRPC services beside ours: health, reflection, and errors with details."""
