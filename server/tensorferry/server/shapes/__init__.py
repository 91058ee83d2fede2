"""What follows from the shapes of a request alone: answers without rows, axes of length zero, axes that must agree."""
