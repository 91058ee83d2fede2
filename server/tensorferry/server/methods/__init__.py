"""Methods of the protocol beside inference, and of the standard services."""
