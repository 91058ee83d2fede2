"""GPU memory and CUDA graphs. Nothing here has been measured on a GPU yet: tests run it with the CPU as the device."""
