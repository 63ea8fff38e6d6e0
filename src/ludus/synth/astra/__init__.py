"""ASTRA: from a page of text to an environment with tools, state, tasks, a verifier and trajectories.

`design` asks a language model, `examination` tries what it wrote in the sandbox, `package` writes the folder,
`method` is `ludus synth astra`.
"""
