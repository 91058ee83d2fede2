"""Child processes that run a Python function of an app file, for functions that hold the interpreter's lock."""
