"""Names of a checkpoint's files."""

STATE = "state.json"
WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
RANDOM = "random.safetensors"
# Folders with one file for each rank, where the ranks write what they hold:
WEIGHT_SHARDS, OPTIMIZER_SHARDS = "weights", "optimizer"


def of_rank(folder: str, rank: int) -> str:
    """The file with a rank's shards."""
    return f"{folder}/{rank:05}.safetensors"
