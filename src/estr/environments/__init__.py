"""Environments and tasks: what a policy acts in, and where its problems come from."""
