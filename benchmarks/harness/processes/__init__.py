"""The measured processes: programs (start, ask, end), answers (their end of it), sides (a yard, or a peer)."""
