"""The methods of the protocol other than inference, and the standard services health and reflection."""
