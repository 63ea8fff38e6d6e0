"""The processes that train one model together, and the steps that each of them does."""
