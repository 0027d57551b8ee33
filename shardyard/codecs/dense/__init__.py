"""Codes of dense blocks: one file for each family of codecs.

In: elements of a block, and for some codecs the residual or factor that the sender keeps. Out: a code; or, from a
code, the elements. A receiver checks every length before it allocates memory.

Read `encoding` and `decoding` first: which file makes and reads which codec. `floats` (raw, bf16, fp16), `int8`,
`onebit` and `qsgd` use fewer bits for each element. `topk` and `randomk` send some of the elements. `powersgd` sends
a product of two thin matrices.
"""
