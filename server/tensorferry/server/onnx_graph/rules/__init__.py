"""The rules of operators: what becomes of the rows, one module for each kind of operator."""
