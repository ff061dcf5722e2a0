"""The synthetic coding agents of the demo and the benches: what they ask for, and their client."""
