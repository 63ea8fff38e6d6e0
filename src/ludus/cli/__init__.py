"""The command line: wires everything, and explains what went wrong in one sentence."""
