"""The synthetic coding agents of the demo and the benches: what they ask for, and the client they ask with."""
