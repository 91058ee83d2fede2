"""Device memory and CUDA graphs: staging buffers, pinned memory, captured graphs."""
