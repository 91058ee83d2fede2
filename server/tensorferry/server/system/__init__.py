"""The process and its machine: threads, cores, memory, files, addresses and signals."""
