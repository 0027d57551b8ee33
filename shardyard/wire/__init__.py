"""What travels: generated messages (v1), payload frames, and the conversion to domain values at the door."""
