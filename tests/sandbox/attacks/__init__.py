"""Hostile and broken programs, what must come of each, and a run of them beside honest work.

`cases_*.py` hold the programs as data, `host.py` what is watched from outside, `campaign.py` the run.
`python -m attacks --help`, with `tests/sandbox` on the path, runs them by hand.
"""
