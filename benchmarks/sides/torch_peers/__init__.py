"""What Shardyard is compared with: servers and workers over torch.distributed.rpc, and DistributedDataParallel."""
