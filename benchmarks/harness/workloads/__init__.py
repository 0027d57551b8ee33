"""What is trained or exchanged, the same on all sides: models, data, loops, and the checks that no update was lost."""
