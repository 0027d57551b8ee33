"""How the members of a group reach each other, for strategies whose workers compute together.

In: a group that the coordinator has formed, and tensors. Out: sums of them, copies of them, messages; or `GroupLost`,
once the group lacks a member. Nothing here retries.

Read `collectives` first: the operations of torch.distributed. `connection` connects the members. They find each other
by the keys of `group_store`. `messages` has what one tells another, and `default_group` gives all of it to
what torch runs over its default group. Members on one machine share memory (`shared_members`), and sum (`shared_sums`)
and send (`shared_messages`) through it.
"""
