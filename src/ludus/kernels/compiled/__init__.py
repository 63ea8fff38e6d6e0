"""The Triton kernels and their launches. Import this package only where Triton is installed."""
