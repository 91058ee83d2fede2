"""Python functions of an app file in child processes, for functions that hold the interpreter's lock."""
