"""The processes that train one model together."""
