"""Files between the launching machine and the nodes, in both directions."""
