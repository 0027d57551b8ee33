"""Codes of tables' ids and rows.

In: ascending ids, each once, and a row or gradient for each. Out: bytes, and back again with every length checked.

Read `row_ids` first (gaps between ids, packed), then `row_values` (float32, bf16, or int8 with a scale for each row).
`stochastic_rounding` rounds gradients so that their mean stays what it was.
"""
