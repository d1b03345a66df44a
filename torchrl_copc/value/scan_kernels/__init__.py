"""Compiled kernels of the backward scan; each module needs its compiler and is imported on first use."""
