"""How ranks share the work: topology, process group, FSDP, recompute, compile, and what is summed over ranks."""
