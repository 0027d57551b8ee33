"""What `shardyard status` shows: a yard's state, asked of its coordinator and servers, as tables or JSON.

In: an address, and the state folder of this machine. Out: text. Nothing here changes a yard.

- `report`: asks, and adds up what the servers say. Read it first.
- `as_json`, `as_tables`: the same report for scripts and for people. JSON is a promise: names stay.
- `words`: parts of a status in words, which other commands print too.
"""
