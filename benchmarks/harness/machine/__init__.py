"""The machine and its network: what processes use of them, memory cgroups, slow links, added delays."""
