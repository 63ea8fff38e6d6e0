"""The GPU's model runner: CUDA graphs over static buffers, steps in flight, memory released while training.

Only graphs and driver calls need a GPU: the same steps run on CPU tensors, without capture, in the tests.
"""
