"""What only a CUDA device has: streams, SM partitions, graphs and flash kernels. Thin, and loaded only for one."""
