"""Methods of the standard services beside ours."""
