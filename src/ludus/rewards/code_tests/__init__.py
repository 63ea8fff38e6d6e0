"""Judging programs: the judge and the judged run in different processes, and exchange plain data."""
