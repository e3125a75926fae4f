"""The wire to the nodes: ssh, one connection to each agent, and what an agent may say on it."""
