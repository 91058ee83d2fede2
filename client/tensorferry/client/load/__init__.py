"""Load tests: steps, load processes, results, and what is made of them. Used by `tensorferry bench`."""
