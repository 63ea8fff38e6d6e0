"""ASTRA: from a page of text to an environment with tools, state, tasks, a verifier and trajectories.

`method` is `ludus synth astra`: it asks a language model and writes the folder; `examination` tries in the
sandbox what the model wrote.
"""
