"""Recorded episodes as rows of Parquet files, and back."""
