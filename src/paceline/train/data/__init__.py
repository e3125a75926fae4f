"""From samples on a disk to the batches of a rank: order, shards, loading, shares."""
