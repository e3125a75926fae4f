"""What a script gets that makes its DistributedDataParallel itself, without a session."""
