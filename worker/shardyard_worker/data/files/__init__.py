"""Data sets over lists of files: `record_files` finds records, `file_sources` reads their bytes."""
