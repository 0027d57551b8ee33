"""Data sets that read by index what has no index of its own.

`record_files` finds records in lists of files, and `file_sources` reads their bytes. `stream_dataset` goes through a
stream.
"""
