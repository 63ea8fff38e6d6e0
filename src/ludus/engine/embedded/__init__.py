"""The embedded engine: samples in this process, from the module that is trained, with a paged KV cache."""
