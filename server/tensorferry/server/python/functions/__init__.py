"""Python functions of app files: their import, their call, and what they raise, in the server and in child processes."""
