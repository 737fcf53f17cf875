"""Triton kernels of metrics; imported only where Triton is installed and a GPU is used."""
