"""Steps over buffers that stay where they are: captured graphs, steps under way, memory that is handed back.

Nothing here but graphs and driver calls needs a GPU: the same steps run on CPU tensors, uncaptured, where the
tests exercise them.
"""
