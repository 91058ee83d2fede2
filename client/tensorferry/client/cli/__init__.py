"""Shell commands of the client: infer, ready, models, describe, top."""
