"""The rules of operators: where the rows are in their outputs. One module for each kind of operator."""
