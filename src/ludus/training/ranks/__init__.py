"""The processes that train one model together, and the program that each of them runs."""
