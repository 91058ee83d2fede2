"""Rules about shapes: answers for requests without rows, axes of length zero, axes that must agree."""
